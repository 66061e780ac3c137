"""A request's settings, as every plan sees them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from dllm_engine.decoding.unmasking_policies import SlowFast, SpanState, split_steps
from dllm_engine.families import Attention, ScheduleKind


class Span(NamedTuple):
    """Canvas positions ``start`` … ``stop - 1``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Blocks(NamedTuple):
    """Blocks ``first`` … ``stop - 1`` of a response."""

    first: int
    stop: int


FIRST_BLOCK = Blocks(0, 1)


class ParallelRule(NamedTuple):
    """A rule of ``PARALLEL_RULES`` and the value that a request gives it."""

    kind: str
    value: float


class CacheOptions(BaseModel):
    """Options of a cache method; the methods without any use this class itself."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    @classmethod
    def of(cls, spec: "DecodingSpec") -> Self:
        """Options of a request of an engine whose cache method has these options."""
        assert isinstance(spec.cache, cls)
        return spec.cache


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
    """A number for each of some tokens, added to their logits at the canvas positions
    before ``stop``.
    """

    stop: int
    values: tuple[tuple[int, float], ...]
    """Token and number, of each token once. −∞: the token is not chosen."""

    @classmethod
    def barring(cls, tokens: Iterable[int], stop: int) -> "TokenBias":
        return cls(stop, tuple((token, -math.inf) for token in sorted(tokens)))

    @cached_property
    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens, int64, and their numbers, float32; ``[num_tokens]`` each."""
        tokens, numbers = zip(*self.values, strict=True) if self.values else ((), ())
        return np.array(tokens, dtype=np.int64), np.array(numbers, dtype=np.float32)


@dataclass(frozen=True)
class DecodingSpec:
    """A request's settings with every default filled in; ``RequestOptions`` explains
    the fields that it has too.
    """

    prompt_length: int
    gen_length: int
    block_length: int
    steps: int
    """Denoising steps over the whole response, at least one per block and at most one
    per token.
    """
    schedule: ScheduleKind = "uniform"
    unmasking: str = "low_confidence"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    shifts_logits: bool = False
    """True if position ``p`` is predicted by row ``p - 1`` (Dream) instead of its own
    row.
    """
    attention: Attention = "full"
    """``block_causal``: attention by blocks of ``block_length``. Blocks are counted
    from the start of the canvas; the first block of the response begins behind the
    prompt."""
    whole_blocks: bool = True
    """Where attention goes by blocks: True if the canvas ends with a whole block, and
    ``block_steps`` are the steps of a whole block, even if a part of it is in the
    prompt (SDAR, LLaDA2)."""
    parallel: ParallelRule | None = None
    """Rule of parallel unmasking, which the request's policy suits; None: a fixed count
    per step.
    """
    slow_fast: SlowFast | None = None
    block_steps: int | None = None
    """The option ``steps_per_block``; with ``parallel``, this schedule sets the minimum
    of each step.
    """
    tokens_per_step: int | None = None
    edit_threshold: float | None = None
    max_post_steps: int = 0
    certainty_sigma: float | None = None
    alg_temp: float = 0.0
    guidance: Guidance | None = None
    block_add_threshold: float | None = None
    suffix_blocks: int | None = None
    end_tokens: frozenset[int] = frozenset()
    confidence_eos_eot_inf: bool = False
    logits_eos_inf: bool = False
    token_biases: tuple[TokenBias, ...] = ()
    """Added to the logits before all else."""
    least_confident: frozenset[int] = frozenset()
    """Tokens that no confidence counts, and that are filled in after all others."""
    first_end: int = 0
    """Canvas position before which the response may not end."""
    early_stop: bool = False
    delay_eos: bool = False
    template: tuple[int | None, ...] = ()
    """The response before its first step: given tokens, and None for each mask. Empty:
    all masks.
    """
    return_given: bool = True
    constraint: bytes | None = None
    """``Automaton.packed`` of what the response's text must match; None: any text."""
    reasoning: bytes | None = None
    """``Automaton.packed`` of the text before that; None: no such text."""
    thinking_budget: int | None = None
    """The most tokens of that text, without the marker that ends it;
    None: any number.
    """
    decision: bytes | None = None
    """``Decision.packed``, whose fields run in one window; None: the request is no
    decision.
    """
    passes: int = 1
    cache: CacheOptions = field(default_factory=CacheOptions)
    num_logprobs: int | None = None
    """Report log-probabilities of the committed token and of this many of the likeliest
    tokens; None: report none.
    """
    return_order: bool = False
    streams_steps: bool = False

    @property
    def is_constrained(self) -> bool:
        return self.constraint is not None or self.reasoning is not None

    @property
    def needs_per_step_output(self) -> bool:
        """True if a step must output more than the positions that it unmasks."""
        return (
            self.streams_steps
            or self.num_logprobs_kept is not None
            or self.guidance is not None
        )

    @property
    def num_logprobs_kept(self) -> int | None:
        """``num_logprobs``, or 0 if only ``return_order`` needs log-probabilities;
        None: nothing needs them.
        """
        return (
            0 if self.return_order and self.num_logprobs is None else self.num_logprobs
        )

    @property
    def response_span(self) -> Span:
        return Span(self.prompt_length, self.prompt_length + self.gen_length)

    @cached_property
    def canvas_length(self) -> int:
        """End of the response, or of its last block: positions between the two are
        decoded and never sent.
        """
        stop = self.response_span.stop
        return (
            self.blocks_start + self.num_blocks * self.block_length
            if self.fills_blocks
            else stop
        )

    @property
    def is_block_causal(self) -> bool:
        return self.attention == "block_causal"

    @property
    def fills_blocks(self) -> bool:
        return self.is_block_causal and self.whole_blocks

    @cached_property
    def blocks_start(self) -> int:
        """First canvas position of the response's first block; it may lie in the
        prompt.
        """
        return (
            self.prompt_length
            - self.prompt_length % self.block_length * self.is_block_causal
        )

    @property
    def canvas_span(self) -> Span:
        return Span(0, self.canvas_length)

    def visible(self, window: Span) -> Span:
        """Canvas positions computed with ``window``: not blocks too far behind it, or
        that attention does not reach.
        """
        if self.is_block_causal:
            return Span(0, window.stop)
        if self.suffix_blocks is None:
            return self.canvas_span
        return Span(
            0,
            min(
                window.stop + self.suffix_blocks * self.block_length, self.canvas_length
            ),
        )

    @cached_property
    def num_blocks(self) -> int:
        return -(-(self.response_span.stop - self.blocks_start) // self.block_length)

    def block_span(self, block: int) -> Span:
        """Canvas positions of a block, within the response; the first and the last
        block may be shorter.
        """
        start = self.blocks_start + block * self.block_length
        return Span(
            max(start, self.prompt_length),
            min(start + self.block_length, self.canvas_length),
        )

    def first_span(self, block: int) -> SpanState | None:
        """State of SlowFast sampling at the start of a block; None: another rule."""
        start = self.block_span(block).start
        return (
            None
            if self.slow_fast is None
            else SpanState(self.slow_fast, self.shifts_logits, start, start)
        )

    def span_of(self, blocks: Blocks) -> Span:
        """Canvas positions of neighbouring blocks."""
        if blocks not in self._spans:
            self._spans[blocks] = Span(
                self.block_span(blocks.first).start,
                self.block_span(blocks.stop - 1).stop,
            )
        return self._spans[blocks]

    @cached_property
    def _spans(self) -> dict[Blocks, Span]:
        """Results of ``span_of``, which every step calls several times."""
        return {}

    def from_block_start(self, window: Span) -> Span:
        """``window``, from the first position of its block on; attention by blocks
        computes blocks whole.
        """
        return Span(window.start - window.start % self.block_length, window.stop)

    def predicting_span(self, blocks: Blocks) -> Span:
        start, stop = self.span_of(blocks)
        return Span(max(start - self.shifts_logits, 0), stop - self.shifts_logits)

    @property
    def extreme_windows(self) -> list[Blocks]:
        """Running blocks with the largest page demand, which rises or falls evenly with
        their start and number.
        """
        last = self.num_blocks - 1
        one_by_one = [Blocks(0, 1), Blocks(last, last + 1)]
        return (
            one_by_one
            if self.block_add_threshold is None
            else [*one_by_one, Blocks(0, last + 1)]
        )

    @property
    def response_template(self) -> tuple[int | None, ...]:
        """The response before its first step, with None for each mask."""
        return self.template or (None,) * self.gen_length

    def is_given(self, position: int) -> bool:
        """Return True if a canvas position of the response holds a token from the
        start.
        """
        return (
            bool(self.template)
            and self.template[position - self.prompt_length] is not None
        )

    @cached_property
    def last_given(self) -> int:
        """The last canvas position that holds a token from the start. Masks before it
        cannot end the response.
        """
        given = (
            i
            for i in range(len(self.template) - 1, -1, -1)
            if self.template[i] is not None
        )
        return self.prompt_length + next(given, -1)

    @cached_property
    def masks_per_block(self) -> tuple[int, ...]:
        canvas = (
            *self.response_template,
            *[None] * (self.canvas_length - self.response_span.stop),
        )
        spans = (self.block_span(block) for block in range(self.num_blocks))
        return tuple(
            canvas[start - self.prompt_length : stop - self.prompt_length].count(None)
            for start, stop in spans
        )

    def place_of_sent(self, number: int) -> int:
        """Canvas position behind the first ``number`` tokens that are sent of a
        response.
        """
        sent = [
            i
            for i, token in enumerate(self.response_template)
            if self.return_given or token is None
        ]
        return self.prompt_length + (sent[number - 1] + 1 if number else 0)

    @property
    def num_masks(self) -> int:
        return sum(self.masks_per_block)

    @property
    def num_sent(self) -> int:
        """Tokens of a response that no end token cuts."""
        return self.gen_length if self.return_given else self.num_masks

    @cached_property
    def steps_per_block(self) -> tuple[int, ...]:
        if self.tokens_per_step is not None:
            return tuple(
                -(-masks // self.tokens_per_step) for masks in self.masks_per_block
            )
        sizes = [self.block_span(block).size for block in range(self.num_blocks)]
        if self.block_steps is None:
            return split_steps(self.steps, sizes)
        whole = self.block_length if self.fills_blocks else 1
        return tuple(min(self.block_steps, max(size, whole)) for size in sizes)

    @property
    def scheduled_per_block(self) -> tuple[int, ...]:
        """Tokens that the steps of each block share: its masks, or all of its
        positions.
        """
        if self.block_steps is None or not self.fills_blocks:
            return self.masks_per_block
        return (self.block_length,) * self.num_blocks

    def most_steps(self, blocks: Blocks) -> int:
        """Upper bound on the forward passes until running blocks are finished, or
        joined by another block.

        Before the last step of the schedule a pass may fill no position: a time grid
        may ask for none, and chance may give none. After it, every second pass fills at
        least one: ES-dLLM may drop the row of the only candidate in one pass, not in
        two. Token editing adds its own passes.
        """
        return (
            sum(self.steps_per_block[slice(*blocks)])
            + 2 * self.span_of(blocks).size
            + self.max_post_steps
        )
