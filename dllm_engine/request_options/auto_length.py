"""Options of a response whose length is chosen before it is decoded."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from dllm_engine.decoding.unmasking_policies import MOST_TOKENS
from dllm_engine.request_options.context import refused
from dllm_engine.request_options.facts import (
    AttentionNeed,
    Exclusion,
    Facts,
    OptionGroup,
)

MOST_CHOSEN = 2048
"""Most tokens of a response whose request names no limit (DAEDAL's L_max)."""
_GRID = 8
"""DAEDAL's growth, of which lengths are multiples."""
_HOW = Facts(default_by="engine")


class AutoLengthOptions(OptionGroup):
    auto_length: Annotated[
        bool | None,
        Facts(
            default_by="engine",
            excludes=(
                Exclusion("response_template", "a template has a length of its own"),
            ),
            needs_attention=AttentionNeed(
                "full", "a block does not see how many masks stand behind it"
            ),
            off=False,
        ),
    ] = None
    """Choose the length of the response before decoding begins (DAEDAL's first stage);
    ``max_tokens`` is the most it may be. In Python also ``gen_length="auto"``."""
    auto_length_start: Annotated[int | None, _HOW] = Field(
        default=None, ge=1, le=MOST_TOKENS
    )
    """Masks that the choice begins with. Unset: 64."""
    auto_length_tail: Annotated[int | None, _HOW] = Field(
        default=None, ge=1, le=MOST_TOKENS
    )
    """Predicted end tokens at the response's end whose probabilities are averaged; those
    that are missing count as 0. Unset: 32."""
    auto_length_threshold: Annotated[float | None, _HOW] = Field(
        default=None, ge=0, le=1
    )
    """The response grows while their mean probability is below this. Unset: 0.5."""
    auto_length_growth: Annotated[float | None, _HOW] = Field(default=None, ge=1, le=16)
    """The next length is this times the one before, rounded up to a multiple of 8, and
    at least 8 more. 1: DAEDAL's own 8 tokens a pass. Unset: 2."""


HOW_LENGTHS = tuple(
    name for name in AutoLengthOptions.model_fields if name != "auto_length"
)
"""How the length is chosen; the fields of ``LengthRule``, but for ``auto_length_``."""


@dataclass(frozen=True)
class LengthRule:
    """How the length of a response is chosen."""

    start: int = 64
    tail: int = 32
    threshold: float = 0.5
    growth: float = 2.0

    def next_length(self, length: int, most: int) -> int:
        """The length after ``length``, at most ``most``."""
        grown = -(-int(length * self.growth) // _GRID) * _GRID
        return min(max(length + _GRID, grown), most)


def length_rule(
    own: AutoLengthOptions, options: AutoLengthOptions, *, ignore_eos: bool
) -> LengthRule | None:
    """The rule of a request with these options, with an engine's defaults in
    ``options``; None: its length is given.
    """
    if own.auto_length and ignore_eos:
        raise refused(
            "auto_length=True and ignore_eos=True: the length is chosen by end tokens; "
            "leave one of them unset"
        )
    if not options.auto_length or ignore_eos:
        return None
    given = {name: getattr(options, name) for name in HOW_LENGTHS}
    return LengthRule(
        **{
            name.removeprefix("auto_length_"): value
            for name, value in given.items()
            if value is not None
        }
    )


def check_no_rule(own: AutoLengthOptions) -> None:
    """Refuse options that only an open length has."""
    for name in HOW_LENGTHS:
        if (value := getattr(own, name)) is not None:
            raise refused(
                f"{name}={value}: the length of this response is not chosen; set "
                f"auto_length, or leave {name} unset"
            )
