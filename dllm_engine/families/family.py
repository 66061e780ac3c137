"""Facts about a model family: the decoding conventions of its authors, and the form of
its checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

ScheduleKind = Literal["uniform", "timestep", "rounded"]
KeysForm = Literal[
    "dense", "olmo", "softmax_experts", "qwen3_experts", "grouped_experts"
]
"""Form of the keys of a config.json. ``dense``: keys of transformers. ``olmo``: keys of
OLMo. ``softmax_experts``, ``qwen3_experts``, ``grouped_experts``: keys of transformers,
with keys for experts chosen by a softmax with a bias, for Qwen3-MoE's experts, or for
experts in groups.
"""
Attention = Literal["full", "block_causal", "causal"]
"""Attention of a position. ``full``: the whole canvas. ``block_causal``: its own block
and the blocks before it, prompt included. ``causal``: itself and the positions before
it; positions of the running block attend to each other."""
BlockOrigin = Literal["canvas", "response"]
"""Position from which attention blocks are counted. ``canvas``: the start of the
canvas, so that a prompt may end inside a block. ``response``: the start of the
response, in both directions, so that the first block of the prompt may be shorter."""
Shard = str | int | tuple[str, int] | None
"""Name of a part of a fused parameter in vLLM's layers, with an expert's number if
there are experts; None: the whole parameter.
"""
NamedModules = Mapping[str, tuple[str, Shard]]
"""Maps a checkpoint's modules in a layer to our module and the shard that they fill."""


@dataclass(frozen=True)
class TensorNames:
    """Names of a checkpoint's tensors. A family may lack some of the modules."""

    embedding: str
    final_norm: str
    head: str
    layers: str
    """Prefix of the layers; the number of the layer follows."""
    in_layer: NamedModules


_COMMON: NamedModules = {
    "input_layernorm": ("attn_norm", None),
    "post_attention_layernorm": ("mlp_norm", None),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
}
TRANSFORMERS_NAMES = TensorNames(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    layers="model.layers",
    in_layer={
        **_COMMON,
        "self_attn.q_proj": ("qkv_proj", "q"),
        "self_attn.k_proj": ("qkv_proj", "k"),
        "self_attn.v_proj": ("qkv_proj", "v"),
        "self_attn.q_norm": ("q_norm", None),
        "self_attn.k_norm": ("k_norm", None),
        "self_attn.o_proj": ("out_proj", None),
        "shared_expert.gate_proj": ("mlp.shared_expert.gate_up_proj", 0),
        "shared_expert.up_proj": ("mlp.shared_expert.gate_up_proj", 1),
        "shared_expert.down_proj": ("mlp.shared_expert.down_proj", None),
    },
)
"""Names in the Llama, Qwen2 and Qwen3 models of transformers."""
LLADA_NAMES = TensorNames(
    embedding="model.transformer.wte",
    final_norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
    layers="model.transformer.blocks",
    in_layer={
        "attn_norm": ("attn_norm", None),
        "ff_norm": ("mlp_norm", None),
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "attn_out": ("out_proj", None),
        "ff_proj": ("mlp.gate_up_proj", 0),
        "up_proj": ("mlp.gate_up_proj", 1),
        "ff_out": ("mlp.down_proj", None),
    },
)
LLADA2_NAMES = replace(
    TRANSFORMERS_NAMES,
    embedding="model.word_embeddings",
    in_layer={
        **_COMMON,
        "attention.query_key_value": ("qkv_proj", None),
        "attention.query_layernorm": ("q_norm", None),
        "attention.key_layernorm": ("k_norm", None),
        "attention.dense": ("out_proj", None),
        "mlp.shared_experts.gate_proj": ("mlp.shared_expert.gate_up_proj", 0),
        "mlp.shared_experts.up_proj": ("mlp.shared_expert.gate_up_proj", 1),
        "mlp.shared_experts.down_proj": ("mlp.shared_expert.down_proj", None),
    },
)


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of a mixture of experts."""

    num_experts: int
    top_k: int
    """Number of experts that compute a row."""
    intermediate_size: int
    """Width of each expert."""
    shared_intermediate_size: int = 0
    """Width of the shared expert, which computes every row; 0: there is none."""
    has_bias: bool = False
    """True if a bias is added to the router's probabilities."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain MLP instead of experts."""
    renormalize: bool = False
    """True if the weights of a row's experts, from the softmax of the router's logits,
    are divided by their sum.
    """
    num_groups: int = 0
    """Number of groups by which experts are chosen, from the sigmoid of the router's
    logits (LLaDA2); 0: no groups.
    """
    num_kept: int = 0
    """Number of groups that the experts of a row come from."""
    scale: float = 1.0
    """Factor of the weights of a row's experts, which sum to 1 before, if experts are
    in groups.
    """
    capacity: int = 0
    """Number of experts that the rows of a block share (LLaDA2.2), instead of groups;
    0: experts are chosen by groups.
    """


@dataclass(frozen=True)
class Disguise:
    """Architecture of another model in the configs of a family. Models of the family
    are identified by a word in their own names, or by ``hf_overrides`` with the
    family's architecture.
    """

    architecture: str
    word: str


@dataclass(frozen=True)
class Unsupported:
    """Models that are not served, although their configs look like those of a family."""

    name: str
    """Word in the models' own names."""
    keys: tuple[str, ...]
    """Config keys that only these models have."""
    reason: str


@dataclass(frozen=True)
class Shape:
    """Sizes that released checkpoints share."""

    sizes: Mapping[str, Any]
    """Keys of the config that differ from the family's defaults."""
    checkpoints: tuple[str, ...] | None = None
    """Released checkpoints of these sizes; None: all checkpoints of the family."""


@dataclass(frozen=True)
class ModelFamily:
    """Facts that all checkpoints of an architecture share."""

    name: str
    model_type: str
    """``model_type`` in config.json. Families may share it."""
    architecture: str
    """Entry of ``architectures`` in config.json. It identifies the family, and vLLM
    finds the model class by it."""
    checkpoints: tuple[str, ...]
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """Shapes by their names in ``dllm bench``."""
    disguise: "Disguise | None" = None
    """Architecture that released configs state instead; None: they state the two above.
    """

    # Decoding
    schedule: ScheduleKind = "uniform"
    """``uniform``: equal counts per step (LLaDA); ``timestep``: counts from a time grid
    (Dream); ``rounded``: the rounded share of what is left (dLLM).
    """
    shifts_logits: bool = False
    """True if position ``p`` is predicted by the hidden state of ``p - 1`` instead of
    ``p``.
    """
    default_unmasking: str = "low_confidence"
    default_block_length: int | None = 32
    """None: the whole response is one block. Where attention goes by blocks, a config
    has its own.
    """
    attention: Attention = "full"
    block_origin: BlockOrigin = "canvas"
    whole_blocks: bool = True
    """With attention by blocks: True if the last block is decoded as a whole block,
    steps of a block are those of a whole block, and a confidence equal to ``threshold``
    is not enough (SDAR's loop, not Stable-DiffCoder's)."""
    seeds_blocks: bool = False
    """True if the first position of a block is predicted by the row before it, in the
    pass that keeps what is before the block (Fast-dLLM v2)."""
    scales_queries: bool = False
    """True if RoPE may state ``llama_4_scaling_beta``, by which queries grow with their
    positions."""
    experts_by_block: bool = False
    """True if the rows of a block share experts, so that blocks must have
    ``default_block_length``. The config decides it."""
    draft_rank: int | None = None
    """Rank of the released LoRA adapters for drafts; None: there are none."""
    exceeds_threshold: bool = False
    """True if a confidence equal to ``threshold`` is not enough."""
    filters_greedy: bool = True
    """True if ``top_p`` and ``top_k`` affect the confidences of greedy requests."""
    strict_entropy_threshold: bool = False
    """True if a position with exactly ``entropy_threshold`` does not pass, and possibly
    no position passes, as in d3LLM's code for Dream."""
    slow_fast: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of ``SlowFast``'s options that differ from those for LLaDA in the code
    of its authors.
    """

    # Tensors
    names: TensorNames = TRANSFORMERS_NAMES
    qkv_bias: bool = False
    """True if queries, keys and values have biases, unless a key of the config decides
    it.
    """
    qk_norm: bool = False
    """True if each head of queries and keys goes through a norm before RoPE, unless a
    key of the config decides it.
    """

    # config.json
    keys_form: KeysForm = "dense"
    key_names: Mapping[str, str] = field(default_factory=dict)
    """The family's names of keys, by transformers' names."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a config may leave out."""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """Ids of special tokens in the released vocabulary, for configs that leave them
    out.
    """
    mask_token: str | None = None
    """Name of the mask in the tokenizer, for configs that leave its id out."""
    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Kinds of checkpoints that no config key tells apart, and their differences from
    this row. The model's own name contains the kind's name, or ``hf_overrides`` sets
    ``kind``.
    """
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that change the computation, with the implemented values, the default first.
    """
    without_effect: tuple[str, ...] = ()
    """Keys that do not affect what the model computes."""
    turns_parts: bool = False
    """True if RoPE may rotate only a part of each head."""
    tokenizer_class: str | None = None
    """Class name in tokenizer_config.json that transformers does not know. Qwen2's
    tokenizer replaces it."""
    template_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the authors' code passes to chat templates."""
    released_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Request defaults of released checkpoints that only their names identify."""
    block_size_in_name: str | None = None
    """Pattern of checkpoint names that contain the block length."""
    base_prompts_have_bos: bool = False
    """True if the authors begin the prompts of base models with the BOS token, although
    the tokenizer does not."""
    unsupported: tuple[Unsupported, ...] = ()
    barred: Unsupported | None = None
    """Models that are served, except that the tokens under ``keys`` are never chosen.
    """

    def block_length_of(self, gen_length: int) -> int:
        """Block length of a request that names none. With attention by blocks it does
        not depend on the length of the response.
        """
        return self.attention_block or min(
            self.default_block_length or gen_length, gen_length
        )

    @property
    def architectures(self) -> set[str]:
        """Architectures that configs of the family may state."""
        disguise = set() if self.disguise is None else {self.disguise.architecture}
        return {self.architecture} | disguise

    @property
    def has_blocks(self) -> bool:
        """True if a kind of the family has attention by blocks."""
        kinds = [kind.get("attention", "full") for kind in self.kinds.values()]
        return any(attention != "full" for attention in (self.attention, *kinds))

    @property
    def attention_block(self) -> int | None:
        """Length of attention blocks, unless a request names another; None: there are
        no blocks.
        """
        return self.default_block_length if self.attention != "full" else None

    @property
    def has_one_pass(self) -> bool:
        """True if attention depends only on positions, so that one forward pass over a
        whole canvas computes the same as the steps of a response, wherever the prompt
        ends.
        """
        return (
            self.attention != "causal"
            and self.block_origin == "canvas"
            and not self.seeds_blocks
        )

    def longest_canvas(self, max_model_len: int) -> int:
        """Canvas length of a request with at most ``num_tokens`` tokens, whose last
        block is whole.
        """
        return max_model_len + -max_model_len % (self.attention_block or 1)
