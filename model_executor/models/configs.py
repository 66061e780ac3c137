"""Configs and tokenizers of the supported checkpoints. They are registered with
transformers in place of the remote code in ``auto_map``."""

from collections.abc import Mapping
from typing import Any

from transformers import (
    AutoTokenizer,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2Tokenizer,
)

from dllm_engine.families import (
    FAMILIES,
    ModelFamily,
)
from dllm_engine.model_executor.models.config_facts import (
    KEPT_KEYS,
    ConfigFacts,
    model_name_of,
    own_values,
    schema_of,
    schema_values,
    source_of,
    unsupported_model,
)
from dllm_engine.model_executor.models.config_keys import (
    SCHEMAS,
    CheckpointKeys,
)
from dllm_engine.model_executor.models.rope_keys import QUERY_SCALE


class Config(ConfigFacts, PretrainedConfig):
    """Config of a supported checkpoint: the keys of ``schema``, also under the names
    that vLLM reads (``hidden_size``, …). Each change (vLLM's hf_overrides) builds it
    anew, so that changes obey the same rules as the file."""

    ignore_keys_at_rope_validation = frozenset({"partial_rotary_factor", QUERY_SCALE})

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.__init__ = Config.__init__  # type: ignore[method-assign] # transformers makes one of the annotations

    def __init__(self, /, **values: Any) -> None:
        """Raises ``ValueError`` naming the file, the key, its value and the allowed
        values.
        """
        self._set_values(values, source_of(values))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a key. vLLM sets hf_overrides one by one and reads ``rope_type`` before
        it calls this package, so here the older key ``type`` is renamed, and a missing
        ``rope_type`` filled in."""
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
        self._set_values(stated | changed, f"{source_of(stated)} with hf_overrides")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the config of the right family. transformers finds configs by
        ``model_type``, which families share.
        """
        config_class = config_class_of(config_dict | kwargs) or cls
        return (
            super().from_dict(config_dict, **kwargs)
            if config_class is cls
            else config_class.from_dict(config_dict, **kwargs)
        )

    def check(self) -> None:
        """Check that a model can be served with this config, whose attributes may have
        been changed directly. Raises as ``__init__``.
        """
        self.schema.read(
            schema_values(self.schema, vars(self)),
            source_of(self._stated),
            model_name_of(self._stated),
        )
        family = self.schema.family
        if family.kinds and self.kind is None:
            kinds = " or ".join(map(repr, family.kinds))
            raise ValueError(
                f"{source_of(self._stated)} does not say which kind of {family.name} "
                f"this is, nor does the model's name; set hf_overrides="
                f'{{"kind": ...}} to {kinds}'
            )
        if self.mask_token_id is None:
            raise ValueError(
                f"{source_of(self._stated)} has no 'mask_token_id', and the tokenizer "
                f"names no mask; a diffusion language model needs the id of its mask "
                f"token there or in hf_overrides"
            )

    def _set_values(self, values: dict[str, Any], source: str) -> None:
        """Set the attributes from the stated keys and the family's defaults."""
        if (model_type := values.get("model_type", self.model_type)) != self.model_type:
            raise ValueError(
                f"{source}: model_type={model_type!r}, but the file is of "
                f"model_type={self.model_type!r}"
            )
        schema_keys = own_values(self.schema, values)
        stated = self.schema.read(schema_keys, source, model_name_of(values))
        self.__dict__.clear()
        kept = {name: values[name] for name in KEPT_KEYS if name in values}
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

    def _remove_keys_not_serialized(self, d: dict[str, Any]) -> None:
        super()._remove_keys_not_serialized(d)
        d.pop("_stated", None)


def config_class_for(family: ModelFamily, schema: type[CheckpointKeys]) -> type[Config]:
    """Config class of the family of ``schema``."""
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


def _shared_class(others: type[PretrainedConfig]) -> type[PretrainedConfig]:
    """Config class for a ``model_type`` that another model has too. transformers gets
    this model's config, unless the checkpoint is one of ours.
    """

    class SharedConfig(others):
        def __new__(cls, **values: Any) -> PretrainedConfig:
            return others(**values)

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            own = config_class_of(config_dict | kwargs) or others
            return own.from_dict(config_dict, **kwargs)

    return SharedConfig


_SHARED_TYPES = {"llama": LlamaConfig, "qwen2": Qwen2Config}
"""Configs of other models whose ``model_type`` some of our checkpoints have."""


def registered_classes() -> dict[str, type[PretrainedConfig]]:
    """One class for each ``model_type``. Its ``from_dict`` finds the other classes of
    the type.
    """
    first = {config.model_type: config for config in reversed(CONFIG_CLASSES.values())}
    shared = {
        model_type: _shared_class(others)
        for model_type, others in _SHARED_TYPES.items()
    }
    return first | shared


TOKENIZER_CLASSES: dict[str, type[Qwen2Tokenizer]] = {
    architecture: type(
        family.tokenizer_class, (Qwen2Tokenizer,), {"__module__": __name__}
    )
    for architecture, family in FAMILIES.items()
    if family.tokenizer_class is not None
}
"""Qwen2's tokenizer under the class names in tokenizer_config.json, by architecture."""
# pickle looks for the classes here.
globals().update(
    {
        own.__name__: own
        for own in [*CONFIG_CLASSES.values(), *TOKENIZER_CLASSES.values()]
    }
)


def register_tokenizers() -> None:
    """Make ``AutoTokenizer`` use the tokenizer classes above. Idempotent."""
    for architecture, tokenizer_class in TOKENIZER_CLASSES.items():
        AutoTokenizer.register(
            CONFIG_CLASSES[architecture],
            tokenizer_class=tokenizer_class,
            exist_ok=True,
        )


def config_class_of(values: Mapping[str, Any]) -> type[Config] | None:
    """Config class for the content of a config.json; None for a model that is not ours."""
    schema = schema_of(values)
    return None if schema is None else CONFIG_CLASSES[schema.family.architecture]


def parse_config(values: Mapping[str, Any], model: str) -> Config:
    """The config of ``model``'s checkpoint. Raises ``ValueError`` naming the file, the
    key and the allowed values.
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
