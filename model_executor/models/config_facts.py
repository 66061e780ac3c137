"""Facts about a model that follow from its config, and a config class that needs no
transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dllm_engine.families import (
    FAMILIES,
    NOT_SUPPORTED,
    ExpertShape,
    ModelFamily,
)
from dllm_engine.model_executor.loading.files import mask_token_id, read_object
from dllm_engine.model_executor.models.config_keys import SCHEMAS, CheckpointKeys
from dllm_engine.model_name import has_word, own_name
from dllm_engine.options import OPTIONS_KEY
from dllm_engine.text import cut, did_you_mean, shortened

SHARED_TYPES = ("llama", "qwen2")
"""``model_type`` of other models that some of our checkpoints have too."""
KEPT_KEYS = ("name_or_path", "_name_or_path", OPTIONS_KEY)
"""Keys that a config keeps beside those of its schema."""
LEFT_OUT_KEYS = frozenset(
    """
_from_model_config _name_or_path architectures assistant_confidence_threshold
assistant_early_exit assistant_ensemble_weight assistant_lookbehind bad_words_ids
begin_suppress_tokens bos_token_id cache_config cache_implementation
chunk_size_feed_forward compile_config constraints continuous_batching_config
decoder_start_token_id disable_compile diversity_penalty do_sample dola_layers dtype
early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id
epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids
forced_bos_token_id forced_eos_token_id guidance_scale id2label is_assistant
is_encoder_decoder label2id length_penalty low_memory max_cache_len max_length
max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p
model_type no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule
num_beam_groups num_beams num_return_sequences output_attentions
output_hidden_states output_logits output_scores pad_token_id penalty_alpha
prefill_chunk_size problem_type prompt_lookup_num_tokens remove_invalid_values
renormalize_logits repetition_penalty return_dict return_dict_in_generate
sequence_bias speculation_type stop_strings suppress_tokens target_lookbehind
temperature token_healing top_h top_k top_p transformers_version typical_p use_cache
use_mtp watermarking_config
""".split()
)
"""Keys that transformers knows in any config. They do not affect what a model computes.
"""


def source_of(values: Mapping[str, Any]) -> str:
    """Name of the file of ``values`` in errors."""
    name = values.get("name_or_path")
    return (
        str(Path(name) / "config.json")
        if isinstance(name, str) and name
        else "config.json"
    )


def model_name_of(values: Mapping[str, Any]) -> str:
    """The model's own name; empty if unknown."""
    name = values.get("name_or_path")
    return own_name(name) if isinstance(name, str) and name else ""


def schema_of(values: Mapping[str, Any]) -> type[CheckpointKeys] | None:
    """Schema for the content of a config.json: among the schemas of its ``model_type``,
    the one that ``architectures`` lists, else the first; None for a model that is not
    ours. If other models share the ``model_type``, the architecture must be listed, or
    the model's own name must identify the family."""
    candidates = [
        schema
        for schema in SCHEMAS.values()
        if schema.family.model_type == values.get("model_type")
    ]
    architectures = values.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    name = model_name_of(values)
    for schema in candidates:
        family = schema.family
        disguise = family.disguise
        if family.architecture in listed or (
            disguise is not None
            and disguise.architecture in listed
            and has_word(name, disguise.word)
        ):
            return schema
    if not candidates or values["model_type"] in SHARED_TYPES:
        return None
    return candidates[0]


def stated_config(model: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json, from a folder or from Hugging Face, downloaded like
    vLLM does.
    """
    path = Path(model) / "config.json"
    if not Path(model).is_dir():
        # Imported here, because the Hub's client takes a second.
        from dllm_engine.model_executor.loading.hub import downloaded_config

        path = downloaded_config(
            model, arguments.get("revision"), arguments.get("hf_token")
        )
    elif not path.is_file():
        raise ValueError(
            f"{model!r} holds no config.json; name the folder of a checkpoint"
        )
    return read_object(path)


def schema_values(
    schema: type[CheckpointKeys], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The values that the schema reads, or refuses."""
    others = {*KEPT_KEYS, *LEFT_OUT_KEYS}
    return {
        name: value
        for name, value in values.items()
        if name in schema.model_fields or name not in others
    }


def own_values(
    schema: type[CheckpointKeys], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The values that the schema reads, with the id of the mask if the folder's
    tokenizer names it."""
    keys = schema_values(schema, values)
    folder = values.get("name_or_path")
    if folder and values.get("mask_token_id") is None:
        token = mask_token_id(folder, schema.family.mask_token)
        keys |= {} if token is None else {"mask_token_id": token}
    return keys


def unsupported_model(model: str, model_type: object, architectures: object) -> str:
    """Message about a model that is not supported."""
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


class ConfigFacts:
    """Mixin for configs: facts that follow from the keys of ``schema``."""

    schema: type[CheckpointKeys]
    kind: str | None
    block_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]

    @property
    def family(self) -> ModelFamily:
        """The checkpoint's family. With attention by blocks it has the config's block
        length.
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
        """Shape of the experts; None if all layers have a plain MLP."""
        return self.schema.experts_of(self)

    @property
    def longest_sequence(self) -> int:
        """Number of positions that the model supports; vLLM's default of
        ``max_model_len``.
        """
        scaled = self.rope_parameters["rope_type"] in ("linear", "dynamic")
        return int(
            self.max_position_embeddings
            * (self.rope_parameters["factor"] if scaled else 1)
        )


class PlainConfig(ConfigFacts):
    """Config of a checkpoint or a shape, for calculations. Keys have the same names as
    in ``Config``.
    """

    def __init__(self, values: Mapping[str, Any], model: str) -> None:
        """Raises ``ValueError`` naming the key, its value and what it may be."""
        named = {**values, "name_or_path": model}
        schema = schema_of(named)
        if schema is None:
            listed = values.get("architectures")
            raise ValueError(unsupported_model(model, values.get("model_type"), listed))
        self.schema = schema
        family = schema.family
        stated = {name: x for name, x in named.items() if name != "model_type"}
        schema_keys = own_values(schema, stated)
        keys = schema.read(schema_keys, source_of(named), model_name_of(named))
        setattr(self, OPTIONS_KEY, values.get(OPTIONS_KEY))
        self.name_or_path = model
        self.include_qkv_bias = family.qkv_bias
        if "qk_layernorm" not in family.key_names:
            self.qk_layernorm = family.qk_norm
        vars(self).update(keys.model_dump())
        self.dtype = keys.dtype or keys.torch_dtype

    def __getattr__(self, name: str) -> Any:
        """Read a key by transformers' name if the family has another name for it."""
        if name == "schema" or name not in (key_names := self.schema.family.key_names):
            raise AttributeError(name)
        return getattr(self, key_names[name])
