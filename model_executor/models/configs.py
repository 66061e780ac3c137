"""Configuration classes of the supported checkpoints, under the keys their ``config.json`` files use.

They are registered with ``transformers.AutoConfig`` so that the checkpoints' own remote code is never needed, also
where ``auto_map`` names some.
"""

from typing import Any

from transformers import PretrainedConfig

LLADA_RELEASED_VOCAB_SIZE = 126_464
LLADA_RELEASED_END_OF_TURN_ID = 126_348
DREAM_RELEASED_VOCAB_SIZE = 152_064
DREAM_RELEASED_END_OF_TURN_ID = 151_645


class LLaDAConfig(PretrainedConfig):
    """``config.json`` of GSAI-ML/LLaDA-8B-Base, -Instruct, LLaDA-1.5 and checkpoints of the same layout.

    The attributes vLLM asks for (``hidden_size``, ``num_attention_heads``, …) are aliases of LLaDA's own names.
    """

    model_type = "llada"
    attribute_map = {  # noqa: RUF012 - the annotation of the base class
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "weight_tying",
    }

    def __init__(
        self,
        d_model: int = 4096,
        n_heads: int = 32,
        n_kv_heads: int | None = None,
        n_layers: int = 32,
        mlp_hidden_size: int | None = None,
        mlp_ratio: int = 4,
        vocab_size: int = LLADA_RELEASED_VOCAB_SIZE,
        embedding_size: int | None = None,
        max_sequence_length: int = 4096,
        rope_theta: float = 500_000.0,
        rms_norm_eps: float = 1e-5,
        weight_tying: bool = False,
        include_bias: bool = False,
        include_qkv_bias: bool = False,
        mask_token_id: int | None = None,
        end_of_turn_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.d_model = d_model
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads if n_kv_heads is not None else n_heads
        self.n_layers = n_layers
        self.mlp_hidden_size = mlp_hidden_size if mlp_hidden_size is not None else mlp_ratio * d_model
        # The embedding has `embedding_size` rows; the tokenizer may use fewer.
        self.vocab_size = max(vocab_size, embedding_size or 0)
        self.max_sequence_length = max_sequence_length
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.weight_tying = weight_tying
        self.include_bias = include_bias
        self.include_qkv_bias = include_qkv_bias
        self.mask_token_id = mask_token_id
        if end_of_turn_token_id is None and vocab_size == LLADA_RELEASED_VOCAB_SIZE:
            end_of_turn_token_id = LLADA_RELEASED_END_OF_TURN_ID
        self.end_of_turn_token_id = end_of_turn_token_id
        kwargs.pop("tie_word_embeddings", None)
        super().__init__(tie_word_embeddings=weight_tying, **kwargs)


class DreamConfig(PretrainedConfig):
    """``config.json`` of Dream-org/Dream-v0-Base-7B, -Instruct-7B and what shares their architecture."""

    model_type = "Dream"

    def __init__(
        self,
        vocab_size: int = DREAM_RELEASED_VOCAB_SIZE,
        hidden_size: int = 3584,
        intermediate_size: int = 18_944,
        num_hidden_layers: int = 28,
        num_attention_heads: int = 28,
        num_key_value_heads: int | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 131_072,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 1_000_000.0,
        rope_scaling: dict[str, Any] | None = None,
        use_sliding_window: bool = False,
        mask_token_id: int | None = None,
        end_of_turn_token_id: int | None = None,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads if num_key_value_heads is not None else num_attention_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        # transformers keeps its own, normalised `rope_scaling`; what the file said is all that matters here.
        self.rope_type = (rope_scaling or {}).get("rope_type", (rope_scaling or {}).get("type", "default"))
        self.use_sliding_window = use_sliding_window
        self.mask_token_id = mask_token_id
        if end_of_turn_token_id is None and vocab_size == DREAM_RELEASED_VOCAB_SIZE:
            end_of_turn_token_id = DREAM_RELEASED_END_OF_TURN_ID
        self.end_of_turn_token_id = end_of_turn_token_id
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
