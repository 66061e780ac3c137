"""Model families: decoding conventions of their authors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

ScheduleKind = Literal["uniform", "timestep"]
Attention = Literal["full", "block_causal"]
"""Attention of a position. ``full``: the whole canvas. ``block_causal``: its own block and the blocks before it,
counted from the start of the canvas, prompt included."""


@dataclass(frozen=True)
class ModelFamily:
    """Decoding conventions shared by all checkpoints of one architecture."""

    name: str
    model_type: str
    """``model_type`` in the checkpoint's config.json, which families may share."""
    architecture: str
    """The entry of ``architectures`` in config.json, which tells families apart, and under which vLLM finds the model
    class."""
    schedule: ScheduleKind
    """``uniform``: equal counts per step (LLaDA); ``timestep``: counts from a time grid (Dream)."""
    shifts_logits: bool
    """True if position ``p`` is predicted by the hidden state of ``p - 1`` instead of ``p``."""
    default_unmasking: str
    default_block_length: int | None
    """None: the whole response is one block. Where attention goes by blocks, ``family_of`` takes it from the config."""
    checkpoints: tuple[str, ...]
    attention: Attention = "full"
    keeps_blocks: bool = False
    """True if the authors' loop keeps keys and values of finished blocks, stored by a pass of their own."""
    strict_entropy_threshold: bool = False
    """True if a position at exactly ``entropy_threshold`` does not pass, and no position may pass, as in d3LLM's code
    for Dream."""
    slow_fast: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Defaults of ``SlowFast``'s options that differ from LLaDA's, in the code of its authors."""

    def block_length_of(self, gen_length: int) -> int:
        """Block length of a request that names none. Attention by blocks has the same for responses of any length."""
        return self.attention_block or min(self.default_block_length or gen_length, gen_length)

    @property
    def attention_block(self) -> int | None:
        """The length of the blocks that attention goes by, unless a request names another; None: there are none."""
        return self.default_block_length if self.attention == "block_causal" else None

    def longest_canvas(self, max_model_len: int) -> int:
        """Canvas positions of a request of at most so many tokens: the block in which they end is whole."""
        return max_model_len + -max_model_len % (self.attention_block or 1)


LLADA = ModelFamily(
    name="LLaDA",
    model_type="llada",
    architecture="LLaDAModelLM",
    schedule="uniform",
    shifts_logits=False,
    default_unmasking="low_confidence",
    default_block_length=32,
    checkpoints=("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5"),
)
LLADA_MOE = replace(
    LLADA,
    name="LLaDA-MoE",
    architecture="LLaDAMoEModelLM",
    checkpoints=("inclusionAI/LLaDA-MoE-7B-A1B-Base", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"),
)
DREAM = ModelFamily(
    name="Dream",
    model_type="Dream",
    architecture="DreamModel",
    schedule="timestep",
    shifts_logits=True,
    default_unmasking="entropy",
    default_block_length=None,
    checkpoints=(
        "Dream-org/Dream-v0-Base-7B",
        "Dream-org/Dream-v0-Instruct-7B",
        "Dream-org/Dream-Coder-v0-Instruct-7B",
        "apple/DiffuCoder-7B-Instruct",
    ),
    strict_entropy_threshold=True,
    slow_fast={"span_threshold": 0.1, "slow_threshold": 0.8, "slow_minimum": 2, "fast_minimum": 2},
)
SDAR = replace(
    LLADA,
    name="SDAR",
    model_type="sdar",
    architecture="SDARForCausalLM",
    default_block_length=4,
    checkpoints=("JetLM/SDAR-1.7B-Chat", "JetLM/SDAR-4B-Chat", "JetLM/SDAR-8B-Chat"),
    attention="block_causal",
    keeps_blocks=True,
)
SDAR_MOE = replace(
    SDAR,
    name="SDAR-MoE",
    model_type="sdar_moe",
    architecture="SDARMoeForCausalLM",
    checkpoints=("JetLM/SDAR-30B-A3B-Chat", "JetLM/SDAR-30B-A3B-Sci"),
)
LLADA2 = replace(
    SDAR,
    name="LLaDA2",
    model_type="llada2_moe",
    architecture="LLaDA2MoeModelLM",
    default_block_length=32,
    checkpoints=("inclusionAI/LLaDA2.0-mini", "inclusionAI/LLaDA2.0-flash"),
    keeps_blocks=False,
)
FAMILIES: dict[str, ModelFamily] = {
    family.architecture: family for family in (LLADA, LLADA_MOE, DREAM, SDAR, SDAR_MOE, LLADA2)
}

NOT_SUPPORTED = {
    "Fast_dLLM_Qwen": "Fast-dLLM v2, which shifts logits and decodes parts of blocks; take SDAR or LLaDA2.0",
    "llada2_moe_veomni": "LLaDA2 with merged experts, as dFactory trains it; split them again with moe_convertor.py",
}
"""Block diffusion models of other kinds, by ``model_type``: what they are, and what to do."""


def find_family(model_type: object, architectures: object) -> ModelFamily | None:
    """The family that a config states: of those of its ``model_type`` the one that ``architectures`` lists, else the
    first; None where there is none of the type."""
    candidates = [family for family in FAMILIES.values() if family.model_type == model_type]
    listed = architectures if isinstance(architectures, list) else []
    return next(
        (family for family in candidates if family.architecture in listed), candidates[0] if candidates else None
    )


def family_of(hf_config: object) -> ModelFamily:
    """The family of a checkpoint's config, with the config's own block length where attention goes by blocks.

    Raises ``ValueError`` naming the supported families.
    """
    model_type = getattr(hf_config, "model_type", None)
    family = find_family(model_type, getattr(hf_config, "architectures", None))
    if family is None:
        supported = ", ".join(sorted({family.model_type for family in FAMILIES.values()}))
        raise ValueError(
            f"model_type={model_type!r} is not a supported diffusion language model; supported: {supported}"
        )
    if family.attention == "full":
        return family
    return replace(family, default_block_length=getattr(hf_config, "block_size"))  # noqa: B009 - configs of transformers


def model_end_tokens(hf_config: object) -> list[int]:
    """The end tokens that a checkpoint's config names."""
    return _config_tokens(hf_config, "eos_token_id")


def every_end_token(hf_config: object) -> list[int]:
    """Those, and what ends a turn of a chat."""
    return [*model_end_tokens(hf_config), *_config_tokens(hf_config, "end_of_turn_token_id")]


def _config_tokens(hf_config: object, key: str) -> list[int]:
    value = getattr(hf_config, key, None)
    return value if isinstance(value, list) else [] if value is None else [value]
