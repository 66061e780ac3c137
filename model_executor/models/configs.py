"""Configurations of the supported checkpoints: what a ``config.json`` may state, and the classes that hold it.

The classes are registered with ``transformers.AutoConfig`` so that the checkpoints' own remote code is never needed,
also where ``auto_map`` names some.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from transformers import PretrainedConfig

from dllm_engine.families import DREAM, FAMILIES, LLADA
from dllm_engine.options import explain

LLADA_RELEASED_VOCAB_SIZE = 126_464
LLADA_RELEASED_END_OF_TURN_ID = 126_348
DREAM_RELEASED_VOCAB_SIZE = 152_064
DREAM_RELEASED_END_OF_TURN_ID = 151_645

# No model comes near these bounds; they keep a damaged file from asking for all memory.
LayerCount = Annotated[int, Field(ge=1, le=10_000)]
HeadCount = Annotated[int, Field(ge=1, le=100_000)]
Width = Annotated[int, Field(ge=1, le=10_000_000)]
VocabularySize = Annotated[int, Field(ge=1, le=1 << 24)]
Positions = Annotated[int, Field(ge=1, le=1 << 24)]
Epsilon = Annotated[float, Field(gt=0, lt=1)]
RopeBase = Annotated[float, Field(gt=0)]
TokenId = Annotated[int, Field(ge=0)]
WeightType = Annotated[
    Literal["float32", "bfloat16", "float16"], BeforeValidator(lambda value: str(value).removeprefix("torch."))
]


class CheckpointKeys(BaseModel):
    """Keys of ``config.json`` that both families share; keys that no schema names may hold anything."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    family: ClassVar[Any]
    size_keys: ClassVar[tuple[str, str, str]]
    """The family's names of the hidden size, the attention heads and the KV heads."""

    architectures: list[str] | None = None
    dtype: WeightType | None = None
    torch_dtype: WeightType | None = None
    quantization_config: dict[str, Any] | None = None
    vocab_size: VocabularySize
    rms_norm_eps: Epsilon
    rope_theta: RopeBase
    mask_token_id: TokenId | None = None
    end_of_turn_token_id: Any = None
    eos_token_id: Any = None

    @field_validator("architectures")
    @classmethod
    def _of_this_family(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and cls.family.architecture not in value:
            raise ValueError(
                f"model_type={cls.family.model_type!r} goes with the architecture {cls.family.architecture!r}"
            )
        return value

    @field_validator("end_of_turn_token_id", "eos_token_id")
    @classmethod
    def _token_ids(cls, value: Any) -> Any:
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in ids):
            raise ValueError("must be a token id or a list of token ids")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = self.size_keys
        hidden, heads, kv_heads = (getattr(self, name) for name in names)
        if hidden % heads or hidden // heads % 2:
            raise ValueError(
                f"{names[1]}={heads} does not divide {names[0]}={hidden} into heads of an even size, which RoPE needs"
            )
        if kv_heads is not None and heads % kv_heads:
            raise ValueError(f"{names[2]}={kv_heads} does not divide {names[1]}={heads}")
        rows = max(self.vocab_size, getattr(self, "embedding_size", None) or 0)
        if self.mask_token_id is not None and self.mask_token_id >= rows:
            raise ValueError(f"mask_token_id={self.mask_token_id} is outside the vocabulary of {rows}")
        return self

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> Self:
        """Validate ``values``; raises ``ValueError`` naming ``source``, the key, its value and what it may be."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ValueError(f"{source}: {explain(error, '')}") from None


class LLaDAKeys(CheckpointKeys):
    """LLaDA's keys, and what its checkpoints mean where they leave one out."""

    family = LLADA
    size_keys = ("d_model", "n_heads", "n_kv_heads")

    d_model: Width = 4096
    n_heads: HeadCount = 32
    n_kv_heads: HeadCount | None = None
    n_layers: LayerCount = 32
    mlp_hidden_size: Width | None = None
    mlp_ratio: HeadCount = 4
    vocab_size: VocabularySize = LLADA_RELEASED_VOCAB_SIZE
    embedding_size: VocabularySize | None = None
    max_sequence_length: Positions = 4096
    rope_theta: RopeBase = 500_000.0
    rms_norm_eps: Epsilon = 1e-5
    weight_tying: bool = False
    include_bias: bool = False
    include_qkv_bias: bool = False


class DreamKeys(CheckpointKeys):
    """Dream's keys, and what its checkpoints mean where they leave one out."""

    family = DREAM
    size_keys = ("hidden_size", "num_attention_heads", "num_key_value_heads")

    vocab_size: VocabularySize = DREAM_RELEASED_VOCAB_SIZE
    hidden_size: Width = 3584
    intermediate_size: Width = 18_944
    num_hidden_layers: LayerCount = 28
    num_attention_heads: HeadCount = 28
    num_key_value_heads: HeadCount | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: RopeBase = 1_000_000.0
    rope_scaling: dict[str, Any] | None = None
    use_sliding_window: bool = False
    tie_word_embeddings: bool = False


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
        if stated.end_of_turn_token_id is None and stated.vocab_size == LLADA_RELEASED_VOCAB_SIZE:
            self.end_of_turn_token_id = LLADA_RELEASED_END_OF_TURN_ID
        super().__init__(tie_word_embeddings=stated.weight_tying, **rest)


class DreamConfig(PretrainedConfig):
    """``config.json`` of Dream-org/Dream-v0-Base-7B, -Instruct-7B and what shares their architecture."""

    model_type = DREAM.model_type
    schema: ClassVar[type[CheckpointKeys]] = DreamKeys

    def __init__(self, **values: Any) -> None:
        stated = DreamKeys.read(values, _source(values))
        rest = _keep(self, stated, values)
        if stated.num_key_value_heads is None:
            self.num_key_value_heads = stated.num_attention_heads
        # transformers keeps its own, normalised `rope_scaling`; what the file said is all that matters here.
        scaling = stated.rope_scaling or {}
        self.rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        if stated.end_of_turn_token_id is None and stated.vocab_size == DREAM_RELEASED_VOCAB_SIZE:
            self.end_of_turn_token_id = DREAM_RELEASED_END_OF_TURN_ID
        super().__init__(tie_word_embeddings=stated.tie_word_embeddings, **rest)


CONFIG_CLASSES: dict[str, type[LLaDAConfig] | type[DreamConfig]] = {
    config.model_type: config for config in (LLaDAConfig, DreamConfig)
}


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


def parse_config(values: Mapping[str, Any], model: str) -> LLaDAConfig | DreamConfig:
    """The config of ``model``'s checkpoint; raises ``ValueError`` naming the file, the key and what it may be."""
    model_type = values.get("model_type")
    config_class = CONFIG_CLASSES.get(model_type) if isinstance(model_type, str) else None
    if config_class is None:
        raise ValueError(unsupported_model(model, model_type, values.get("architectures")))
    stated = {name: value for name, value in values.items() if name != "model_type"}
    return config_class(**stated | {"name_or_path": model})


def check_config(config: PretrainedConfig) -> None:
    """Check a config that may have been changed since its file was read, and that a model can be served with it.

    Raises ``ValueError`` naming the file, the key and what it may be.
    """
    if not isinstance(config, LLaDAConfig | DreamConfig):
        raise ValueError(unsupported_model(str(config.name_or_path), config.model_type, config.architectures))
    source = config_file(config)
    # transformers keeps `torch_dtype` as `dtype`, and warns whoever asks for it.
    names = config.schema.model_fields.keys() - {"torch_dtype"}
    config.schema.read({name: getattr(config, name) for name in names if hasattr(config, name)}, source)
    if config.mask_token_id is None:
        raise ValueError(
            f"{source} has no 'mask_token_id'; a diffusion language model needs the id of its mask token there"
        )


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
    return (
        f"model {model!r}{found}: model_type={model_type!r} is not a supported diffusion language model; "
        f"supported: {supported}"
    )


def config_file(config: PretrainedConfig) -> str:
    """The file of ``config``, as an error names it."""
    return _source({"name_or_path": config.name_or_path})


def _source(values: Mapping[str, Any]) -> str:
    """The file that ``values`` were read from, as an error names it."""
    name = values.get("name_or_path")
    return str(Path(name) / "config.json") if isinstance(name, str) and name else "config.json"


def _keep(config: PretrainedConfig, stated: CheckpointKeys, values: Mapping[str, Any]) -> dict[str, Any]:
    """Set the family's keys as attributes of ``config``; returns the other values, which its base class keeps."""
    own = {name: value for name, value in stated if name not in _BASE_KEYS}
    for name, value in own.items():
        setattr(config, name, value)
    rest = {name: value for name, value in values.items() if name not in own and name != "rope_scaling"}
    # vLLM finds the model class by it; `model_type` has told which it is.
    return rest | {"architectures": values.get("architectures") or [stated.family.architecture]}
