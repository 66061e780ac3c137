"""Resolved settings of a request, for plans and passes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from dllm_engine.decoding.canvas_layout import Blocks, CanvasLayout
from dllm_engine.decoding.option_types import Options, Share
from dllm_engine.decoding.unmasking_policies import (
    UNMASKING_POLICIES,
    SlowFast,
    SlowFastState,
    UnmaskingPolicy,
    split_steps,
)
from dllm_engine.families import ScheduleKind


class ParallelRule(NamedTuple):
    """A rule of ``PARALLEL_RULES`` and the value that a request gives it."""

    kind: str
    value: float


PaperSettings = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Cache options of papers, by family and by a word of the model's name in lower case.
The first word in the name counts. A name without any of the words gets the last entry.
"""
TunedValues = Mapping[str, Sequence[Any]]
"""Values that `dllm tune` tries for the cache options that trade speed for accuracy
most.
"""


class CacheOptions(Options):
    """Base class of a cache method's options. Methods without options use this class
    itself.
    """

    paper_settings: ClassVar[PaperSettings] = {}
    tuned: ClassVar[TunedValues] = {}

    @classmethod
    def of(cls, spec: "DecodingSpec") -> Self:
        """Options of a request. The engine's cache method must have options of this
        class.
        """
        assert isinstance(spec.cache, cls)
        return spec.cache

    @property
    def unguided(self) -> str | None:
        """Settings that exclude a guide, because steps do not draft every position
        then; None: there are none.
        """
        return None

    @property
    def unshared(self) -> str | None:
        """Settings that exclude ``share_prompts``; None: there are none."""
        return None

    @property
    def keeps_running_block(self) -> bool:
        """True if pages keep rows of the running block that cannot be computed again.
        Pages are then reserved for the whole response, so that no request loses them.
        """
        return False

    @property
    def largest(self) -> Self:
        """Options with which a request of unknown prompt length holds the most pages."""
        return self

    def refusal(self, spec: "DecodingSpec") -> str | None:
        """Reason why these options do not suit a request; None: they do."""
        return None


class EvictingOptions(CacheOptions):
    """Options of a method that retains a share of the computed tokens. Requests may
    lower the share."""

    retention_ratio: Share = 1.0
    """Share of tokens that is retained."""


class DraftingOptions(CacheOptions):
    """Options of a method that computes drafts of self-speculation."""

    draft_lora: str | None = None
    """Folder in the checkpoint with a LoRA adapter for drafts of self-speculation, such
    as ``linear_spec_lora``. Texts are the same with and without it."""


@dataclass(frozen=True)
class Guidance:
    """Settings of Guided Diffusion (arXiv 2505.21467): request options, without
    ``guide_`` before their names.
    """

    speculation_length: int = 32
    top_k: int = 1
    threshold: float | None = None
    fallback: Literal["guide", "draft"] = "guide"
    correction: bool = False


@dataclass(frozen=True)
class TokenBias:
    """Numbers for some tokens, which are added to their logits at the canvas positions
    ``start`` … ``stop - 1``.
    """

    stop: int
    values: tuple[tuple[int, float], ...]
    """Pairs of token and number, each token once. −∞: the token is never chosen."""
    start: int = 0
    others: float = 0.0
    """Number for all other tokens."""

    @classmethod
    def barring(cls, tokens: Iterable[int], stop: int, start: int = 0) -> "TokenBias":
        values = tuple((token, -math.inf) for token in sorted(tokens))
        return cls(stop, values, start)

    @classmethod
    def only(cls, tokens: Iterable[int], position: int) -> "TokenBias":
        """The bias that allows only these tokens at a position."""
        values = tuple((token, 0.0) for token in tokens)
        return cls(position + 1, values, position, -math.inf)

    @cached_property
    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens, int64, and their numbers, float32; ``[num_tokens]`` each."""
        tokens, numbers = zip(*self.values, strict=True) if self.values else ((), ())
        return np.array(tokens, dtype=np.int64), np.array(numbers, dtype=np.float32)


@dataclass(frozen=True)
class Schedule:
    """Schedule: number of tokens that each step unmasks, and when blocks begin."""

    steps: int
    """Denoising steps over the whole response, at least one per block and at most one
    per token.
    """
    kind: ScheduleKind = "uniform"
    block_steps: int | None = None
    """The option ``steps_per_block``. With ``Unmasking.parallel``, the schedule sets
    the minimum of each step.
    """
    tokens_per_step: int | None = None
    block_add_threshold: float | None = None

    def steps_per_block(self, layout: CanvasLayout) -> tuple[int, ...]:
        if self.tokens_per_step is not None:
            return tuple(
                -(-masks // self.tokens_per_step) for masks in layout.masks_per_block
            )
        sizes = [layout.block_span(block).size for block in range(layout.num_blocks)]
        if self.block_steps is None:
            return split_steps(self.steps, sizes)
        whole = layout.block_length if layout.fills_blocks else 1
        return tuple(min(self.block_steps, max(size, whole)) for size in sizes)


@dataclass(frozen=True)
class Unmasking:
    """Settings for choosing the positions that a step fills, and the decided tokens
    that it replaces.
    """

    policy: UnmaskingPolicy = UNMASKING_POLICIES["low_confidence"]
    parallel: ParallelRule | None = None
    """Rule of parallel unmasking; None: a fixed count per step."""
    slow_fast: SlowFast | None = None
    certainty_sigma: float | None = None
    alg_temp: float = 0.0
    edit_threshold: float | None = None
    max_post_steps: int = 0


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing a token from a position's logits."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    token_biases: tuple[TokenBias, ...] = ()


@dataclass(frozen=True)
class Ends:
    """Tokens that end a response, and rules for them."""

    tokens: frozenset[int] = frozenset()
    earliest: int = 0
    """Canvas position before which the response may not end."""
    early_stop: bool = False
    delay_eos: bool = False
    barred: tuple[TokenBias, ...] = ()
    """Biases that exclude end tokens up to a canvas position."""
    least_confident: frozenset[int] = frozenset()
    """Tokens that do not count in confidences, and are filled in after all others."""


@dataclass(frozen=True)
class TextPattern:
    """Text that a response must match."""

    constraint: bytes | None = None
    """``Automaton.packed`` for the response's text; None: any text."""
    reasoning: bytes | None = None
    """``Automaton.packed`` for the reasoning before this text; None: no reasoning."""
    thinking_budget: int | None = None
    """The most tokens of the reasoning, without the marker that ends it; None: any
    number.
    """

    @property
    def is_constrained(self) -> bool:
        return self.constraint is not None or self.reasoning is not None


@dataclass(frozen=True)
class PackedDecision:
    """A decision. All of its fields are in one window."""

    packed: bytes
    """``Decision.packed``"""
    passes: int = 1


@dataclass(frozen=True)
class Reports:
    """What steps report beside tokens."""

    num_logprobs: int | None = None
    """Report log-probabilities of the committed token and of this many of the likeliest
    tokens; None: report none.
    """
    return_order: bool = False
    streams_steps: bool = False

    @property
    def num_logprobs_kept(self) -> int | None:
        """``num_logprobs``, or 0 if only ``return_order`` needs log-probabilities; None
        if they are not needed.
        """
        if self.return_order and self.num_logprobs is None:
            return 0
        return self.num_logprobs


@dataclass(frozen=True)
class DecodingSpec:
    """Settings of a request with all defaults filled in. ``RequestOptions`` describes
    the fields that both have.
    """

    layout: CanvasLayout
    schedule: Schedule
    unmasking: Unmasking = Unmasking()
    sampling: Sampling = Sampling()
    ends: Ends = Ends()
    text: TextPattern = TextPattern()
    reports: Reports = Reports()
    cache: CacheOptions = field(default_factory=CacheOptions)
    guidance: Guidance | None = None
    """None: the request has no guide."""
    decision: PackedDecision | None = None
    """None: the request is not a decision."""
    num_sharable: int | None = None
    """Number of tokens at the beginning of the prompt that are computed once for all
    requests with the same beginning: whole pages, or for a decision all tokens. None:
    without ``share_prompts``.
    """

    @property
    def token_biases(self) -> tuple[TokenBias, ...]:
        """Biases that are added to the logits first."""
        return (*self.ends.barred, *self.sampling.token_biases)

    @property
    def needs_per_step_output(self) -> bool:
        """True if a step must keep statistics beyond the positions that it unmasks."""
        return (
            self.reports.streams_steps
            or self.reports.num_logprobs_kept is not None
            or self.guidance is not None
        )

    def first_slow_fast(self, block: int) -> SlowFastState | None:
        """State of SlowFast sampling at the start of a block; None for other rules."""
        if self.unmasking.slow_fast is None:
            return None
        start = self.layout.block_span(block).start
        return SlowFastState(
            self.unmasking.slow_fast, self.layout.shifts_logits, start, start
        )

    @property
    def extreme_windows(self) -> list[Blocks]:
        """Candidates for the running blocks with the largest page demand. Demand
        changes evenly with their start and number, so it is largest at an extreme.
        """
        last = self.layout.num_blocks - 1
        windows = [Blocks(0, 1), Blocks(last, last + 1)]
        if self.schedule.block_add_threshold is not None:
            windows.append(Blocks(0, last + 1))
        return windows

    @cached_property
    def steps_per_block(self) -> tuple[int, ...]:
        return self.schedule.steps_per_block(self.layout)

    @property
    def scheduled_per_block(self) -> tuple[int, ...]:
        """Number of tokens that the schedule of each block distributes: its masks, or
        all of its positions.
        """
        layout = self.layout
        if self.schedule.block_steps is None or not layout.fills_blocks:
            return layout.masks_per_block
        return (layout.block_length,) * layout.num_blocks

    def most_steps(self, blocks: Blocks) -> int:
        """Upper bound of the forward passes until running blocks are finished, or
        another block joins.

        Up to the last step of the schedule a pass may fill no position: a time grid may
        ask for none, or a policy may draw none. After it, at least every second pass
        fills a position: ES-dLLM may drop the row of the only candidate in one pass,
        but not in two. Token editing adds passes.
        """
        return (
            sum(self.steps_per_block[slice(*blocks)])
            + 2 * self.layout.span_of(blocks).size
            + self.unmasking.max_post_steps
        )
