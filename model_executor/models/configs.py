"""Configurations of the supported checkpoints: the classes that hold what a ``config.json`` states.

The classes are registered with ``transformers.AutoConfig`` so that the checkpoints' own remote code is never needed,
also where ``auto_map`` names some.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import PretrainedConfig

from dllm_engine.families import DREAM, FAMILIES, LLADA, LLADA2, LLADA_MOE, NOT_SUPPORTED, SDAR, SDAR_MOE, find_family
from dllm_engine.model_executor.models import config_keys
from dllm_engine.model_executor.models.config_keys import (
    BlockModelKeys,
    CheckpointKeys,
    DreamKeys,
    LLaDA2Keys,
    LLaDAKeys,
    LLaDAMoEKeys,
    SDARKeys,
    SDARMoeKeys,
)
from dllm_engine.options import OPTIONS_KEY


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of a mixture of experts."""

    num_experts: int
    top_k: int
    """Experts that compute a row."""
    intermediate_size: int
    """Of each expert."""
    shared_intermediate_size: int = 0
    """Of the expert that computes every row; 0: there is none."""
    has_bias: bool = False
    """Whether a bias is added to the router's probabilities."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain MLP instead."""
    groups: "ExpertGroups | None" = None
    """None: the experts are one group, chosen by the softmax of the router's logits."""
    renormalize: bool = False
    """Whether a row's weights from that softmax are divided by their sum."""


@dataclass(frozen=True)
class ExpertGroups:
    """How experts are chosen by group (LLaDA2)."""

    num_groups: int
    num_kept: int
    """Groups that a row's experts come from."""
    scale: float
    """Of a row's weights, which sum to 1 before."""


_WITHOUT_EFFECT = {
    *("auto_map", "name_or_path", "transformers_version", "use_cache", "pad_token_id", "bos_token_id"),
    *("attention_dropout", "initializer_range", "output_router_logits", "router_aux_loss_coef"),
    *("router_num_group", "router_topk_group", *PretrainedConfig().to_dict(), OPTIONS_KEY),
}
"""Keys of LLaDA-MoE's checkpoints that say nothing about what the model computes."""
_BASE_KEYS = ("architectures", "dtype", "torch_dtype", "quantization_config", "eos_token_id", "rope_scaling")
"""Keys that ``PretrainedConfig`` itself keeps."""


class LLaDAConfig(PretrainedConfig):
    """``config.json`` of GSAI-ML/LLaDA-8B-Base, -Instruct, LLaDA-1.5 and checkpoints of the same layout.

    The attributes vLLM asks for (``hidden_size``, ``num_attention_heads``, …) are aliases of LLaDA's own names.
    """

    model_type = LLADA.model_type
    schema: ClassVar[type[CheckpointKeys]] = LLaDAKeys
    attribute_map = {  # noqa: RUF012 - the annotation of the base class
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "weight_tying",
    }

    def __init__(self, **values: Any) -> None:
        values.pop("tie_word_embeddings", None)  # LLaDA goes by `weight_tying`
        values = {self.attribute_map.get(name, name): value for name, value in values.items()}
        stated = LLaDAKeys.read(values, _source(values))
        rest = _keep(self, stated, values)
        if stated.n_kv_heads is None:
            self.n_kv_heads = stated.n_heads
        if stated.mlp_hidden_size is None:
            self.mlp_hidden_size = stated.mlp_ratio * stated.d_model
        # The embedding has `embedding_size` rows; the tokenizer may use fewer.
        self.vocab_size = max(stated.vocab_size, stated.embedding_size or 0)
        if stated.end_of_turn_token_id is None and stated.vocab_size == config_keys.LLADA_RELEASED_VOCAB_SIZE:
            self.end_of_turn_token_id = config_keys.LLADA_RELEASED_END_OF_TURN_ID
        super().__init__(tie_word_embeddings=stated.weight_tying, **rest)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """transformers knows configs by their ``model_type``, which LLaDA-MoE shares."""
        own = config_class_of(config_dict) if cls is LLaDAConfig else None
        if own is None or own is cls:
            return super().from_dict(config_dict, **kwargs)
        return own.from_dict(config_dict, **kwargs)


class LLaDAMoEConfig(PretrainedConfig):
    """``config.json`` of inclusionAI/LLaDA-MoE-7B-A1B-Base and -Instruct, which has no mask token id."""

    model_type = LLADA_MOE.model_type
    schema: ClassVar[type[CheckpointKeys]] = LLaDAMoEKeys
    include_qkv_bias: ClassVar[bool] = False
    attribute_map = {"intermediate_size": "dense_intermediate_size"}  # noqa: RUF012 - the annotation of the base class

    def __init__(self, **values: Any) -> None:
        source = _source(values)
        stated = LLaDAMoEKeys.read(values, source)
        known = {*LLaDAMoEKeys.model_fields, *_WITHOUT_EFFECT}
        if unknown := sorted(name for name in values if name not in known and not name.startswith("_")):
            raise ValueError(
                f"{source}: {', '.join(unknown)}: not known of LLaDA-MoE; remove what does not change the computation"
            )
        rest = _keep(self, stated, values)
        if stated.num_key_value_heads is None:
            self.num_key_value_heads = stated.num_attention_heads
        if stated.vocab_size == config_keys.LLADA_MOE_RELEASED_VOCAB_SIZE:
            if stated.mask_token_id is None:
                self.mask_token_id = config_keys.LLADA_MOE_RELEASED_MASK_ID
            rest["eos_token_id"] = (
                config_keys.LLADA_MOE_RELEASED_END_ID if stated.eos_token_id is None else stated.eos_token_id
            )
        if stated.rope_scaling is not None:
            self.rope_type = _rope_type(stated.rope_scaling)
        super().__init__(tie_word_embeddings=stated.tie_word_embeddings, **rest)

    @property
    def experts(self) -> ExpertShape:
        return ExpertShape(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.expert_intermediate_size,
            shared_intermediate_size=self.shared_expert_intermediate_size or 0,
            has_bias=bool(self.moe_router_enable_expert_bias),
            dense_layers=tuple(i for i, has_experts in enumerate(self.moe_layer_freq) if not has_experts),
        )


class DreamConfig(PretrainedConfig):
    """``config.json`` of Dream-org/Dream-v0-Base-7B, -Instruct-7B and what shares their architecture."""

    model_type = DREAM.model_type
    schema: ClassVar[type[CheckpointKeys]] = DreamKeys

    def __init__(self, **values: Any) -> None:
        stated = DreamKeys.read(values, _source(values))
        rest = _keep(self, stated, values)
        if stated.num_key_value_heads is None:
            self.num_key_value_heads = stated.num_attention_heads
        self.rope_type = _rope_type(stated.rope_scaling)
        if stated.end_of_turn_token_id is None and stated.vocab_size == config_keys.DREAM_RELEASED_VOCAB_SIZE:
            self.end_of_turn_token_id = config_keys.DREAM_RELEASED_END_OF_TURN_ID
        super().__init__(tie_word_embeddings=stated.tie_word_embeddings, **rest)


class BlockModelConfig(PretrainedConfig):
    """``config.json`` of a model whose attention goes by blocks."""

    include_qkv_bias: ClassVar[bool] = False
    schema: ClassVar[type[BlockModelKeys]]
    released_ids: ClassVar[dict[str, int]]
    """Special tokens of the released vocabulary, for a config that leaves them out."""

    def __init__(self, **values: Any) -> None:
        stated = self.schema.read(values, _source(values))
        rest = _keep(self, stated, values)
        if stated.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if stated.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.rope_type = _rope_type(stated.rope_scaling)
        if stated.vocab_size == self.schema.model_fields["vocab_size"].default:
            for name, token in self.released_ids.items():
                if getattr(stated, name) is None:
                    setattr(self, name, token)
                    rest[name] = token
        super().__init__(tie_word_embeddings=stated.tie_word_embeddings, **rest)


class SDARConfig(BlockModelConfig):
    """``config.json`` of JetLM/SDAR-1.7B-Chat, -4B-Chat and -8B-Chat, which has no block size and no mask token id."""

    model_type = SDAR.model_type
    schema = SDARKeys
    qk_layernorm: ClassVar[bool] = True
    released_ids: ClassVar[dict[str, int]] = {
        "mask_token_id": config_keys.SDAR_RELEASED_MASK_ID,
        "eos_token_id": config_keys.SDAR_RELEASED_END_ID,
        "end_of_turn_token_id": config_keys.SDAR_RELEASED_END_OF_TURN_ID,
    }

    def __init__(self, **values: Any) -> None:  # transformers makes another one for a class without its own
        super().__init__(**values)


class SDARMoeConfig(SDARConfig):
    """``config.json`` of JetLM/SDAR-30B-A3B-Chat and -Sci: SDAR's, and Qwen3-MoE's keys of experts."""

    model_type = SDAR_MOE.model_type
    schema = SDARMoeKeys

    def __init__(self, **values: Any) -> None:  # as SDAR's
        super().__init__(**values)

    @property
    def experts(self) -> ExpertShape:
        dense, step = self.mlp_only_layers or [], self.decoder_sparse_step
        return ExpertShape(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=tuple(i for i in range(self.num_hidden_layers) if i in dense or (i + 1) % step),
            renormalize=self.norm_topk_prob,
        )


class LLaDA2Config(BlockModelConfig):
    """``config.json`` of inclusionAI/LLaDA2.0-mini and -flash, which has no block size and no mask token id."""

    model_type = LLADA2.model_type
    schema = LLaDA2Keys
    released_ids: ClassVar[dict[str, int]] = {
        "mask_token_id": config_keys.LLADA_MOE_RELEASED_MASK_ID,
        "eos_token_id": config_keys.LLADA_MOE_RELEASED_END_ID,
    }

    def __init__(self, **values: Any) -> None:  # as SDAR's
        super().__init__(**values)

    @property
    def qk_layernorm(self) -> bool:
        return bool(self.use_qk_norm)

    @property
    def experts(self) -> ExpertShape:
        return ExpertShape(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            shared_intermediate_size=self.moe_intermediate_size * (self.num_shared_experts or 0),
            has_bias=self.moe_router_enable_expert_bias,
            dense_layers=tuple(range(self.first_k_dense_replace)),
            groups=ExpertGroups(self.n_group, self.topk_group, self.routed_scaling_factor),
        )


Config = LLaDAConfig | LLaDAMoEConfig | DreamConfig | SDARConfig | SDARMoeConfig | LLaDA2Config
CONFIG_CLASSES: dict[str, type[Config]] = {
    config.schema.family.architecture: config
    for config in (LLaDAConfig, LLaDAMoEConfig, DreamConfig, SDARConfig, SDARMoeConfig, LLaDA2Config)
}


def config_class_of(values: Mapping[str, Any]) -> type[Config] | None:
    """The class for the content of a config.json; None for a model of another kind."""
    family = find_family(values.get("model_type"), values.get("architectures"))
    return None if family is None else CONFIG_CLASSES[family.architecture]


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``; raises ``ValueError`` naming the file where it holds none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file.parent} holds no {file.name}; name the folder of a checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold a JSON object, not a {type(values).__name__}")
    return values


def parse_config(values: Mapping[str, Any], model: str) -> Config:
    """The config of ``model``'s checkpoint; raises ``ValueError`` naming the file, the key and what it may be."""
    config_class = config_class_of(values)
    if config_class is None:
        raise ValueError(unsupported_model(model, values.get("model_type"), values.get("architectures")))
    stated = {name: value for name, value in values.items() if name != "model_type"}
    return config_class(**stated | {"name_or_path": model})


def check_values(config: object, allowed: Mapping[str, tuple[object, ...]], source: str, family: str = "") -> None:
    """Raise ``ValueError`` where a key has a value that a model does not implement.

    Args:
        allowed: values by key; a key that ``config`` lacks counts as the first.
        source: the file of ``config``, as the error names it.
        family: of the model, as the error names it.
    """
    for key, values in allowed.items():
        if (value := getattr(config, key, values[0])) not in values:
            model = f" for {family}" if family else ""
            raise ValueError(f"{source}: {key}={value!r} is not supported{model}, only {values[0]!r}")


def unsupported_model(model: str, model_type: object, architectures: object) -> str:
    """What to say of a model of another kind."""
    found = f" of architecture {', '.join(map(str, architectures))}" if isinstance(architectures, list) else ""
    supported = ", ".join(f"{family.architecture} ({family.name})" for family in FAMILIES.values())
    known = f" ({NOT_SUPPORTED[model_type]})" if isinstance(model_type, str) and model_type in NOT_SUPPORTED else ""
    return (
        f"model {model!r}{found}: model_type={model_type!r} is not a supported diffusion language model{known}; "
        f"supported: {supported}"
    )


def config_file(config: PretrainedConfig) -> str:
    """The file of ``config``, as an error names it."""
    return _source({"name_or_path": config.name_or_path})


def _source(values: Mapping[str, Any]) -> str:
    """The file that ``values`` were read from, as an error names it."""
    name = values.get("name_or_path")
    return str(Path(name) / "config.json") if isinstance(name, str) and name else "config.json"


def _rope_type(rope_scaling: dict[str, Any] | None) -> str:
    """transformers keeps its own, normalised ``rope_scaling``; what the file said is all that matters here."""
    scaling = rope_scaling or {}
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def _keep(config: PretrainedConfig, stated: CheckpointKeys, values: Mapping[str, Any]) -> dict[str, Any]:
    """Set the family's keys as attributes of ``config``; returns the other values, which its base class keeps."""
    own = {name: value for name, value in stated if name not in _BASE_KEYS}
    for name, value in own.items():
        setattr(config, name, value)
    rest = {name: value for name, value in values.items() if name not in own and name != "rope_scaling"}
    # vLLM finds the model class by it.
    return rest | {"architectures": values.get("architectures") or [stated.family.architecture]}
