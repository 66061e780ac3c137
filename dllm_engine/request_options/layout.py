"""Options of the canvas: its length, its blocks, and its given tokens."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from dllm_engine.decoding.canvas_layout import CanvasLayout
from dllm_engine.decoding.option_types import Count, CountOrZero, Share
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.context import RequestContext, refused
from dllm_engine.request_options.facts import (
    AttentionNeed,
    Exclusion,
    Facts,
    OptionGroup,
)
from dllm_engine.text import parsed_json

MOST_CHOSEN = 2048
"""Limit on the response if the request names none, in tokens (DAEDAL's L_max)."""
_GRID = 8
"""Lengths are multiples of this: DAEDAL's growth per pass."""
_HOW = Facts(default_by="engine")
_BY_AGREEMENT = "the next token is always that of the row before it"


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
    auto_length_start: Annotated[Count | None, _HOW] = None
    """Masks that the choice begins with. Unset: 64."""
    auto_length_tail: Annotated[Count | None, _HOW] = None
    """Predicted end tokens at the response's end whose probabilities are averaged;
    those that are missing count as 0. Unset: 32.
    """
    auto_length_threshold: Annotated[Share | None, _HOW] = None
    """The response grows while their mean probability is below this. Unset: 0.5."""
    auto_length_growth: Annotated[float | None, _HOW] = Field(default=None, ge=1, le=16)
    """The next length is this times the one before, rounded up to a multiple of 8, and
    at least 8 more. 1: DAEDAL's own 8 tokens a pass. Unset: 2."""


LENGTH_RULE_OPTIONS = tuple(
    name for name in AutoLengthOptions.model_fields if name != "auto_length"
)
"""Options that choose the length: ``LengthRule``'s fields, after ``auto_length_``."""


@dataclass(frozen=True)
class LengthRule:
    """The rule that chooses the length of a response."""

    start: int = 64
    tail: int = 32
    threshold: float = 0.5
    growth: float = 2.0

    def next_length(self, length: int, limit: int) -> int:
        """The next length to try after ``length``, at most ``limit``."""
        grown = -(-int(length * self.growth) // _GRID) * _GRID
        return min(max(length + _GRID, grown), limit)


def length_rule(
    own: AutoLengthOptions, options: AutoLengthOptions, *, ignore_eos: bool
) -> LengthRule | None:
    """The length rule of a request; None: its length is given. ``options``: the
    request's options with the engine's defaults.
    """
    if own.auto_length and ignore_eos:
        raise refused(
            "auto_length=True and ignore_eos=True: the length is chosen by end tokens; "
            "leave one of them unset"
        )
    if not options.auto_length or ignore_eos:
        return None
    return LengthRule(**options.settings(LENGTH_RULE_OPTIONS, "auto_length_"))


def refuse_length_options(own: AutoLengthOptions) -> None:
    """Refuse options that only requests with an open length have."""
    for name in LENGTH_RULE_OPTIONS:
        if (value := getattr(own, name)) is not None:
            raise refused(
                f"{name}={value}: the length of this response is not chosen; set "
                f"auto_length, or leave {name} unset"
            )


class LayoutOptions(OptionGroup):
    decoding: Annotated[
        Literal["diffusion", "autoregressive", "self_speculation"] | None,
        Facts(
            default_by="checkpoint",
            excludes=(
                Exclusion("steps_per_block", _BY_AGREEMENT),
                Exclusion("tokens_per_step", _BY_AGREEMENT),
            ),
            decided_by_guide=True,
            needs_attention=AttentionNeed("causal", "no row predicts the next token"),
            needs_decided=True,
            off="diffusion",
        ),
    ] = None
    """``autoregressive``: one token per step, each from the row before it.
    ``self_speculation``: the same text in fewer steps. One step drafts a block, or
    several do by a rule of parallel unmasking; the next verifies the drafts and keeps
    those before the first wrong one. Unset: ``diffusion``."""
    block_length: Annotated[Count | None, Facts(default_by="checkpoint")] = None
    """Response tokens denoised together, at most ``gen_length``. The last block may be
    shorter. Models with attention by blocks attend by blocks of this length, which may
    be longer than the response."""
    sub_block_length: Annotated[
        Count | None,
        Facts(
            default_by="checkpoint",
            needs_attention=AttentionNeed(
                "block_causal", "only blocks that attention goes by have parts"
            ),
        ),
    ] = None
    """Parts of a block that are denoised one after the other, from left to right; it
    divides ``block_length``. Each step computes the whole block."""
    suffix_blocks: Annotated[
        CountOrZero | None,
        Facts(
            default_by="engine",
            needs_attention=AttentionNeed(
                "full",
                "a block attends to nothing behind it, so that nothing there is "
                "computed",
            ),
        ),
    ] = None
    """Masked blocks after the running ones that a step computes (DPad). Unset: all of
    them. Cache methods that keep the whole canvas refuse it."""
    response_template: Annotated[
        Annotated[list[int | None], BeforeValidator(parsed_json)] | None,
        Facts(
            needs_attention=AttentionNeed(
                "full",
                "a block attends to nothing behind it, so that it cannot fill in "
                "before given text (template, suffix)",
            )
        ),
    ] = None
    """The response with given tokens: a token id where one is given, None where the
    model fills one in. ``gen_length`` is only an upper bound then, and may stay unset.
    """
    return_given: bool | None = None
    """False: leave the given tokens of ``response_template`` out of what is returned,
    and of ``gen_length``.
    """

    @property
    def returned_length(self) -> int | None:
        """Number of tokens that ``response_template`` returns; None without a template."""
        template = self.response_template
        if template is None:
            return None
        return template.count(None) if self.return_given is False else len(template)


def resolve_layout(
    request: RequestContext,
    own: LayoutOptions,
    options: LayoutOptions,
    decided: tuple[int | None, ...] | None,
) -> CanvasLayout:
    """Canvas layout of a request. ``decided``: the template of a decision; None: the
    request is not a decision."""
    template = given_tokens(own, request.params.max_tokens or 0)
    if decided is not None:
        template = decided
    gen_length = len(template) or request.params.max_tokens
    family = request.family
    block_length = _block_length(request, own, options, gen_length)
    round_length = None
    if options.decoding in ("autoregressive", "self_speculation"):
        round_length = block_length
        block_length = 1
    part = options.sub_block_length or block_length
    if block_length % part:
        if own.sub_block_length is not None:
            raise refused(
                f"sub_block_length={part} does not divide block_length={block_length}"
            )
        part = block_length  # the default is for another block length
    return CanvasLayout(
        request.prompt_length,
        gen_length,
        part,
        round_length=round_length,
        attention_block=block_length if part < block_length else None,
        seeds_blocks=family.seeds_blocks,
        attention=family.attention,
        block_origin=family.block_origin,
        whole_blocks=family.whole_blocks,
        shifts_logits=family.shifts_logits,
        suffix_blocks=options.suffix_blocks,
        template=template,
        return_given=options.return_given is not False,
    )


def given_tokens(own: LayoutOptions, max_tokens: int) -> tuple[int | None, ...]:
    """The request's template. Refuses a template that cannot be a response."""
    template = own.response_template
    if template is None:
        if own.return_given is not None:
            raise refused(
                f"return_given={own.return_given}: nothing is given; set "
                f"response_template, or leave return_given unset"
            )
        return ()
    if max_tokens < (own.returned_length or 0):
        raise refused(
            f"max_tokens={max_tokens} (gen_length) is less than the "
            f"{own.returned_length} tokens that come back by the template; raise it, "
            f"or leave it unset"
        )
    if None not in template:
        raise refused(
            "response_template has nothing to fill in; put None where the model is to "
            "write"
        )
    return tuple(template)


def _block_length(
    request: RequestContext,
    own: LayoutOptions,
    options: LayoutOptions,
    gen_length: int,
) -> int:
    """Length of blocks, fitted to a template, and to any response if the request names
    none. Attention blocks may be longer than the response.
    """
    family = request.family
    if options.decoding == "autoregressive":
        if own.block_length is not None:
            raise refused(
                f"block_length={own.block_length}: decoding='autoregressive' goes "
                f"token by token; leave one of them unset"
            )
        return 1
    block_length = options.block_length or family.block_length_of(gen_length)
    if family.attention == "full" and block_length > gen_length:
        if own.block_length is not None and own.response_template is None:
            raise refused(
                f"block_length={block_length} is out of range: it must be 1 … "
                f"gen_length (max_tokens), here {gen_length}"
            )
        block_length = gen_length
    if family.experts_by_block and block_length != family.attention_block:
        raise refused(
            f"block_length={block_length}: this model chooses experts by blocks of "
            f"{family.attention_block}; leave it unset"
        )
    return block_length


def check_suffix(options: LayoutOptions, engine: EngineOptions) -> None:
    if options.suffix_blocks is not None and not engine.method.trims_suffix:
        raise refused(
            f"suffix_blocks={options.suffix_blocks}: "
            f"cache_method={engine.cache_method!r} keeps the whole canvas; leave "
            f"suffix_blocks unset, or start the engine with another cache method"
        )
