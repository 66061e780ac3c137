"""Configurations and tokenizers of the supported checkpoints, registered with
transformers in place of the remote code that ``auto_map`` names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2Tokenizer,
)

from dllm_engine.families import (
    DREAM,
    FAMILIES,
    NOT_SUPPORTED,
    ModelFamily,
)
from dllm_engine.model_executor.loading.files import mask_token_id, read_object
from dllm_engine.model_executor.loading.hub import downloaded_config
from dllm_engine.model_executor.models.config_facts import ConfigFacts
from dllm_engine.model_executor.models.config_keys import (
    SCHEMAS,
    CheckpointKeys,
)
from dllm_engine.model_executor.models.rope_keys import QUERY_SCALE
from dllm_engine.model_name import has_word, own_name
from dllm_engine.options import OPTIONS_KEY
from dllm_engine.text import cut, did_you_mean, shortened

_KEPT_KEYS = ("name_or_path", "_name_or_path", OPTIONS_KEY)
"""Keys beside a schema's that a config keeps."""
_LEFT_OUT_KEYS = {*PretrainedConfig().to_dict(), *GenerationConfig().to_dict()}
"""Keys of any model that transformers knows; none says what a model computes."""


class Config(ConfigFacts, PretrainedConfig):
    """Config of a supported checkpoint: the keys of ``schema`` under the names vLLM
    asks for too (``hidden_size``, …). Each change (vLLM's hf_overrides) makes it anew,
    so that the same rules hold as for the file."""

    ignore_keys_at_rope_validation = frozenset({"partial_rotary_factor", QUERY_SCALE})

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.__init__ = Config.__init__  # type: ignore[method-assign] # transformers makes one of the annotations

    def __init__(self, /, **values: Any) -> None:
        """Raises ``ValueError`` naming the file, the key, its value and what
        it may be.
        """
        self._settle(values, _source(values))

    def __setattr__(self, name: str, value: Any) -> None:
        """vLLM sets hf_overrides one by one and reads ``rope_type`` before it calls us,
        so the older key ``type`` is renamed, and a missing one filled in, at once."""
        if (
            name in ("rope_scaling", "rope_parameters")
            and isinstance(value, dict)
            and value
        ):
            renamed = {
                "rope_type" if key == "type" else key: item
                for key, item in value.items()
            }
            value = {"rope_type": "default"} | renamed
        super().__setattr__(name, value)

    def update(self, config_dict: dict[str, Any]) -> None:
        """Change keys; raises ``ValueError`` as ``__init__`` does."""
        new_names = self.attribute_map | {
            "torch_dtype": "dtype",
            "rope_scaling": "rope_parameters",
        }
        changed = {
            new_names.get(name, name): value for name, value in config_dict.items()
        }
        replaced = (
            ("rope_scaling", "rope_parameters") if "rope_parameters" in changed else ()
        )
        stated = {
            name: value for name, value in self._stated.items() if name not in replaced
        }
        self._settle(stated | changed, f"{_source(stated)} with hf_overrides")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """transformers knows configs by their ``model_type``, which families share."""
        own = config_class_of(config_dict | kwargs) or cls
        return (
            super().from_dict(config_dict, **kwargs)
            if own is cls
            else own.from_dict(config_dict, **kwargs)
        )

    def check(self) -> None:
        """Check what may have been changed unseen, and that a model can be served with
        it; raises as ``__init__``.
        """
        self.schema.read(
            self._of_schema(vars(self)),
            _source(self._stated),
            _model_name(self._stated),
        )
        family = self.schema.family
        if family.kinds and self.kind is None:
            kinds = " or ".join(map(repr, family.kinds))
            raise ValueError(
                f"{_source(self._stated)} does not say which kind of {family.name} "
                f"this is, nor does the model's name; set hf_overrides="
                f'{{"kind": ...}} to {kinds}'
            )
        if self.mask_token_id is None:
            raise ValueError(
                f"{_source(self._stated)} has no 'mask_token_id', and the tokenizer "
                f"names no mask; a diffusion language model needs the id of its mask "
                f"token there or in hf_overrides"
            )

    def _settle(self, values: dict[str, Any], source: str) -> None:
        """Take the attributes from what is stated, and from the family's defaults."""
        if (model_type := values.get("model_type", self.model_type)) != self.model_type:
            raise ValueError(
                f"{source}: model_type={model_type!r}, but the file is of "
                f"model_type={self.model_type!r}"
            )
        own = self._of_schema(values) | self._told_by_tokenizer(values)
        stated = self.schema.read(own, source, _model_name(values))
        self.__dict__.clear()
        kept = {name: values[name] for name in _KEPT_KEYS if name in values}
        super().__init__(
            **kept,
            dtype=stated.dtype or stated.torch_dtype,
            architectures=[self.schema.family.architecture],
        )
        for name, value in stated.model_dump(
            exclude={
                "architectures",
                "auto_map",
                "dtype",
                "rope_scaling",
                "torch_dtype",
            }
        ).items():
            setattr(self, name, value)
        self._stated = values

    def _told_by_tokenizer(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The id of the mask, where the folder's tokenizer names it."""
        folder = values.get("name_or_path")
        if not folder or values.get("mask_token_id") is not None:
            return {}
        token = mask_token_id(folder, self.schema.family.mask_token)
        return {} if token is None else {"mask_token_id": token}

    def _of_schema(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that the schema reads, or refuses."""
        fields = self.schema.model_fields
        others = {*_KEPT_KEYS, *_LEFT_OUT_KEYS}
        return {
            name: value
            for name, value in values.items()
            if name in fields or name not in others
        }

    def _remove_keys_not_serialized(self, d: dict[str, Any]) -> None:
        super()._remove_keys_not_serialized(d)
        d.pop("_stated", None)


def config_class_for(family: ModelFamily, schema: type[CheckpointKeys]) -> type[Config]:
    """The config class of a family, whose keys are those of ``schema``."""
    members: dict[str, Any] = {
        "model_type": family.model_type,
        "schema": schema,
        "attribute_map": dict(family.key_names),
        "__module__": __name__,
    }
    if "qk_layernorm" not in family.key_names:
        members["qk_layernorm"] = family.qk_norm
    return type(
        f"{family.architecture}Config",
        (Config,),
        members | {"include_qkv_bias": family.qkv_bias},
    )


CONFIG_CLASSES = {
    architecture: config_class_for(family, SCHEMAS[architecture])
    for architecture, family in FAMILIES.items()
}
globals().update(
    {config.__name__: config for config in CONFIG_CLASSES.values()}
)  # where pickle looks them up


def _shared_class(others: type[PretrainedConfig]) -> type[PretrainedConfig]:
    """What transformers makes of a config.json whose ``model_type`` is also another
    model's: that model's own config, unless the checkpoint is one of ours.
    """

    class SharedConfig(others):
        def __new__(cls, **values: Any) -> PretrainedConfig:
            return others(**values)

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            own = config_class_of(config_dict | kwargs) or others
            return own.from_dict(config_dict, **kwargs)

    return SharedConfig


_SHARED_TYPES = {config.model_type: config for config in (LlamaConfig, Qwen2Config)}
"""Configs of other models, by a ``model_type`` that some of our checkpoints have."""


def registered_classes() -> dict[str, type[PretrainedConfig]]:
    """A class for each ``model_type``, from which ``from_dict`` finds the others of the
    type.
    """
    first = {config.model_type: config for config in reversed(CONFIG_CLASSES.values())}
    shared = {
        model_type: _shared_class(others)
        for model_type, others in _SHARED_TYPES.items()
    }
    return first | shared


class DreamTokenizer(Qwen2Tokenizer):
    """Qwen2's tokenizer with the special tokens of Dream's files, under the name in
    Dream's tokenizer_config.json.
    """


def register_tokenizers() -> None:
    """Make ``AutoTokenizer`` use the class above. Idempotent."""
    AutoTokenizer.register(
        CONFIG_CLASSES[DREAM.architecture],
        tokenizer_class=DreamTokenizer,
        exist_ok=True,
    )


def config_class_of(values: Mapping[str, Any]) -> type[Config] | None:
    """The class for the content of a config.json: of those of its ``model_type`` the
    one that ``architectures`` lists, else the first; None for a model of another kind.
    A type that is others' as well must be listed, or the model's own name must tell."""
    candidates = [
        config
        for config in CONFIG_CLASSES.values()
        if config.model_type == values.get("model_type")
    ]
    architectures = values.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    name = _model_name(values)
    for config in candidates:
        family = config.schema.family
        disguise = family.disguise
        if family.architecture in listed or (
            disguise is not None
            and disguise.architecture in listed
            and has_word(name, disguise.word)
        ):
            return config
    if not candidates or candidates[0].model_type in _SHARED_TYPES:
        return None
    return candidates[0]


def stated_config(model: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json, from a folder or from Hugging Face, downloaded as
    vLLM would.
    """
    path = Path(model) / "config.json"
    if not Path(model).is_dir():
        path = downloaded_config(
            model, arguments.get("revision"), arguments.get("hf_token")
        )
    elif not path.is_file():
        raise ValueError(
            f"{model} holds no config.json; name the folder of a checkpoint"
        )
    return read_object(path)


def parse_config(values: Mapping[str, Any], model: str) -> Config:
    """The config of ``model``'s checkpoint; raises ``ValueError`` naming the file, the
    key and what it may be.
    """
    config_class = config_class_of({**values, "name_or_path": model})
    if config_class is None:
        raise ValueError(
            unsupported_model(
                model, values.get("model_type"), values.get("architectures")
            )
        )
    stated = {name: value for name, value in values.items() if name != "model_type"}
    return config_class(**stated | {"name_or_path": model})


def unsupported_model(model: str, model_type: object, architectures: object) -> str:
    """Message about a model of another kind."""
    listed = (
        f" of architecture {cut(', '.join(map(str, architectures)))}"
        if isinstance(architectures, list)
        else ""
    )
    for part, reason in NOT_SUPPORTED.items():
        if part in str(model_type).lower():
            return f"model {model!r}{listed} is not supported: {reason}"
    named = architectures if isinstance(architectures, list) else []
    types = {family.model_type for family in FAMILIES.values()}
    nearest = did_you_mean(str(model_type), types)
    for family in FAMILIES.values():
        if family.architecture in named:
            nearest = f"; {family.architecture} goes with {family.model_type!r}"
        elif family.disguise is not None and family.disguise.architecture in named:
            nearest = (
                f"; if it is of {family.name}, set hf_overrides="
                f'{{"architectures": ["{family.architecture}"]}}'
            )
    supported = ", ".join(
        f"{family.architecture} ({family.name})" for family in FAMILIES.values()
    )
    return (
        f"model {model!r}{listed}: model_type={shortened(model_type)} is not a "
        f"supported diffusion language model{nearest}; supported: {supported}"
    )


def _model_name(values: Mapping[str, Any]) -> str:
    """The model's own name; empty where there is none."""
    name = values.get("name_or_path")
    return own_name(name) if isinstance(name, str) and name else ""


def _source(values: Mapping[str, Any]) -> str:
    """The file of ``values``, as an error names it."""
    name = values.get("name_or_path")
    return (
        str(Path(name) / "config.json")
        if isinstance(name, str) and name
        else "config.json"
    )
