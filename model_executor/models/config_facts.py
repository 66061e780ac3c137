"""What a config says of its model beside its keys, and a config that can be read without
transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dllm_engine.families import ExpertShape, ModelFamily
from dllm_engine.model_executor.models.config_keys import SCHEMAS, CheckpointKeys


class ConfigFacts:
    """Facts that follow from the keys of ``schema``."""

    schema: type[CheckpointKeys]
    kind: str | None
    block_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]

    @property
    def family(self) -> ModelFamily:
        """The checkpoint's family, with the config's own block length where attention
        goes by blocks.
        """
        family = self.schema.family
        if family.kinds and self.kind is not None:
            family = replace(family, **family.kinds[self.kind])
        if family.attention == "full":
            return family
        shares_experts = bool(getattr(self, "expert_capacity", 0))
        return replace(
            family,
            default_block_length=self.block_size,
            experts_by_block=shares_experts,
        )

    @property
    def experts(self) -> ExpertShape | None:
        """None: all layers have a plain MLP."""
        return self.schema.experts_of(self)

    @property
    def longest_sequence(self) -> int:
        """Positions that the model is for; vLLM's default of ``max_model_len``."""
        scaled = self.rope_parameters["rope_type"] in ("linear", "dynamic")
        return int(
            self.max_position_embeddings
            * (self.rope_parameters["factor"] if scaled else 1)
        )


class PlainConfig(ConfigFacts):
    """The config of a released checkpoint or a shape, for arithmetic: keys under the
    names that ``Config`` has them under.
    """

    def __init__(self, values: Mapping[str, Any], model: str) -> None:
        """Raises ``ValueError`` naming the key, its value and what it may be."""
        (architecture,) = values["architectures"]
        self.schema = SCHEMAS[architecture]
        family = self.schema.family
        stated = {name: x for name, x in values.items() if name != "model_type"}
        keys = self.schema.read(stated, model, "")
        self.name_or_path = model
        self.include_qkv_bias = family.qkv_bias
        if "qk_layernorm" not in family.key_names:
            self.qk_layernorm = family.qk_norm
        vars(self).update(keys.model_dump())
        self.dtype = keys.dtype or keys.torch_dtype

    def __getattr__(self, name: str) -> Any:
        """transformers' name of a key that the family calls otherwise."""
        if name == "schema" or name not in (known := self.schema.family.key_names):
            raise AttributeError(name)
        return getattr(self, known[name])
