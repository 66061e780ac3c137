"""What a forward pass unmasks, as slow, plain Python: blocks, schedules, policies,
sampling, parallel unmasking.

Also how close the closest decision of a run was, so that a test on random weights can
tell a wrong engine from a coin toss. docs/methods.md says how the papers are read; this
is what the code does not show at once:

* Dream in blocks: a block's first pass fills its first position alone, outside the
  schedule and whatever the rule, unless the block has but one pass. With
  ``tokens_per_step`` it does so only where no later pass can predict it.
* ``response_template``: what is given was never masked. A block that has no mask to
  begin with takes no pass, blocks share their masks out over the steps that they would
  have without given tokens, and end tokens have a logit of −∞ where something given
  follows.
* A constraint: the predictions of a pass are the tokens of the most probable text, by
  the sum of logits with their noise, that is accepted with what is decided. A
  confidence is that of this token, and a margin what it is ahead of the best other by.
  It takes what has a logit of −∞ where nothing else is accepted, but no end token
  before ``min_tokens``.
* Seeds (Fast-dLLM v2, Nemotron-Labs-Diffusion): where a block begins behind another,
  its first position is filled alone, whatever the rule, from the last row before it, in
  a pass that sees no row of the block.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from tests.oracles.constrained import PlainConstraint
from tests.oracles.models import PlainModel

RULES = (
    "threshold",
    "factor",
    "entropy_bound",
    "entropy_budget",
    "margin",
    "entropy_threshold",
    "slow_fast",
)
DOUBT = 1e30
"""The entropy of a position that comes after all others."""
RULED_OUT = -1e9
"""What a constraint scores a token with whose logit is −∞."""
Uniform = Callable[[int, int], torch.Tensor]
"""Uniform numbers in (0, 1), float64 ``[vocabulary]``, for a (forward pass, canvas
position).
"""


SLOW_FAST = {
    "span_steps": 6,
    "span_threshold": 0.3,
    "span_window": 2,
    "span_variance": 1,
    "slow_threshold": 0.9,
    "fast_threshold": 0.9,
    "slow_minimum": 1,
    "fast_minimum": 1,
}
SLOW_FAST_OF_DREAM = SLOW_FAST | {
    "span_threshold": 0.1,
    "slow_threshold": 0.8,
    "slow_minimum": 2,
    "fast_minimum": 2,
}


class Scored(NamedTuple):
    """A masked position and what it would become."""

    confidence: float
    position: int
    token: int
    gap: float
    """By how much the token won."""


def gap(a: float, b: float, floor: float = 1e-2) -> float:
    """The relative difference of two numbers that are not compared to more digits than
    float32 has.
    """
    return abs(a - b) / max(abs(a), abs(b), floor)


def steps_per_block(steps: int, sizes: list[int]) -> list[int]:
    """Every block gets a step; the others are shared by the tokens that a block has
    beyond one, largest fractions up.

    Of equal fractions the earlier block's goes up.
    """
    beyond_one = sum(sizes) - len(sizes)
    exact = [
        1 + Fraction((steps - len(sizes)) * (size - 1), max(beyond_one, 1))
        for size in sizes
    ]
    shared = [math.floor(share) for share in exact]
    while sum(shared) < steps and beyond_one:
        fractions = [share - given for share, given in zip(exact, shared, strict=True)]
        shared[fractions.index(max(fractions))] += 1
    return shared


def dream_share(steps: int, step: int) -> torch.Tensor:
    """The share of the masked positions that a step of Dream's schedule fills before
    its last one.
    """
    t = torch.linspace(1, 1e-3, steps + 1)
    return 1 - t[step + 1] / t[step]


def rounded_counts(masks: int, steps: int) -> list[int]:
    """What dLLM's schedule fills in each step, but for steps that would fill nothing:
    the share of what is left by the time that is left, in float32 until it is rounded.
    """
    counts = []
    times = torch.arange(steps, -1, -1, dtype=torch.float64).div(steps).float()
    alphas = 1 - times
    for before, after in pairwise(alphas):
        share = 1 - (1 - after) / (1 - before)
        count = round(float((masks - sum(counts)) * share.double()))
        counts.append(min(count, masks - sum(counts)))
    return [count for count in counts if count]


@dataclass
class Decoding:
    """The canvas of one request and what has been done to it."""

    model: PlainModel
    prompt: list[int]
    gen_length: int
    block_length: int
    sub_block_length: int | None = None
    """Of the parts of a block that are filled one after the other."""
    steps: int | None = None
    steps_per_block: int | None = None
    tokens_per_step: int | None = None
    certainty_sigma: float | None = None
    unmasking: str = "low_confidence"
    threshold: float | None = None
    factor: float | None = None
    entropy_bound: float | None = None
    entropy_budget: float | None = None
    margin: float | None = None
    entropy_threshold: float | None = None
    slow_fast: dict[str, float] | None = None
    block_add_threshold: float | None = None
    suffix_blocks: int | None = None
    early_stop: bool = False
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int = 0
    """Of what a cache method draws."""
    temperature: float = 0.0
    uniform: Uniform | None = None
    """The random numbers of a temperature above 0."""
    order_noise: Callable[[int, int], float] | None = None
    """Those of the policies ``random`` and ``origin`` and of ``alg_temp``, for a
    (forward pass, canvas position).
    """
    top_p: float = 1.0
    top_k: int = 0
    delay_eos: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    alg_temp: float = 0.0
    response_template: list[int | None] | None = None
    constraint: bytes | None = None
    shared: Any = None
    """``SharedPrompts`` of the engine; None: it shares none."""
    buffer: Any = None
    """``SharedBuffer`` of the run, if prompts are shared."""
    num_found: int = 0
    """Tokens of the prompt that were found in shared pages."""
    order: list[list[int]] = field(default_factory=list)
    """Canvas positions unmasked per forward pass."""
    computed: list[list[int]] = field(default_factory=list)
    """Canvas positions fed per forward pass."""
    traces: dict[str, list] = field(default_factory=dict)
    """What else a cache method does, under the names of the engine's figures."""
    closest: float = math.inf
    """The smallest relative margin of any decision."""
    running: list[int] = field(default_factory=lambda: [0])
    """Numbers of the running blocks."""
    step: int = 0
    """Since a block joined them."""
    running_before: list[int] = field(default_factory=list)
    """The running blocks before that; empty if no block has joined."""
    steps_before: int = 0
    """The passes of these."""
    in_rounds: bool = False
    """Whether rounds take the place of blocks; random numbers are the same in all
    passes."""
    verifies: bool = False
    """Whether a pass predicts all positions from the rows before."""
    window_alone: bool = False
    """Whether later passes of a window feed no row before it."""
    fills_computed: bool = False
    """Whether some masked positions of the window have no row."""
    predicts_window: bool = False
    """Whether a pass also predicts what it may not fill of the window behind the first
    position that it may.
    """

    def __post_init__(self) -> None:
        self.by_blocks = self.model.block_length is not None
        start = before = len(self.prompt)
        behind = 0
        self.lead = -start % self.block_length if self.model.counts_back else 0
        part = self.sub_block_length or self.block_length
        if self.by_blocks:
            before -= (before + self.lead) % part
            self.early_stop = False
            behind = (
                -(start + self.gen_length) % self.block_length
                if self.model.whole_blocks
                else 0
            )
        template = self.template = self.response_template or [None] * self.gen_length
        given = [
            i for i, token in enumerate(template, len(self.prompt)) if token is not None
        ]
        self.last_given = max(given, default=0)
        self.first_end = start + self.min_tokens
        self.every_end = [*self.model.end_tokens, *self.model.turn_ends]
        self.canvas = self.prompt + [
            self.model.mask if token is None else token for token in template
        ]
        self.canvas += [self.model.mask] * behind
        self.length = len(self.canvas)
        self.blocks = [
            (max(s, start), min(s + part, self.length))
            for s in range(before, self.length, part)
        ]
        if self.unmasking in ("entropy", "topk_margin"):
            self.threshold = None
        if self.slow_fast is not None:
            self.unmasking = "low_confidence"
            self.slow_fast = (
                SLOW_FAST_OF_DREAM if self.model.is_dream else SLOW_FAST
            ) | self.slow_fast
        self.takes_back = self.unmasking == "p2"
        """Whether decided tokens become masks again where they are the least certain."""
        self.unscheduled = (
            self.block_add_threshold is not None or self.slow_fast is not None
        )
        """Whether blocks have no number of steps."""
        self.dream_sampler = self.model.is_dream
        """Whether a pass fills by Dream's schedule and begins a block with its first
        position.
        """
        self.strict = whole = self.by_blocks and self.model.whole_blocks
        """Whether a confidence of ``threshold`` itself is not enough."""
        self.plain_constraint = (
            PlainConstraint(self.constraint, self.stop_token_ids)
            if self.constraint
            else None
        )
        self.cut = self.length
        """Where the canvas ends for the running pass."""
        self.may_fill: tuple[int, int] | None = None
        """The part of the window that the running pass may fill; None: all of it."""
        self.passing, self.enough = 0.0, 1
        """The confidence that lets a position pass, and how many must have it, else it
        is one.
        """
        self.watches = False
        self.confident: list[int] = []
        """Positions that the last pass which watches found confident."""
        self.spans = self.block_by_spans()
        self.parallel = any(getattr(self, rule) is not None for rule in RULES)
        sizes = [end - first for first, end in self.blocks]
        self.masks_of = [len(self.masked(*block)) for block in self.blocks]
        self.steps_of = steps_per_block(
            sum(sizes) if self.steps is None else self.steps, sizes
        )
        if self.entropy_budget is not None:
            self.steps_per_block = None
        if self.steps_per_block:
            sizes = [part] * len(sizes) if whole else sizes
            self.masks_of = sizes if whole else self.masks_of
            self.steps_of = [min(self.steps_per_block, size) for size in sizes]
        if self.tokens_per_step:
            self.steps_of = [
                math.ceil(masks / self.tokens_per_step) for masks in self.masks_of
            ]

    @property
    def tokens(self) -> list[int]:
        """The response; up to its first end token, if it has one."""
        tokens = self.canvas[len(self.prompt) :][: self.gen_length]
        ends = [i for i, token in enumerate(tokens) if token in self.stop_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens

    @property
    def forward(self) -> int:
        """The number of the pass that random numbers are drawn for."""
        return 0 if self.in_rounds else len(self.order)

    @property
    def draws_tempered(self) -> bool:
        """Whether temperature and filters make a distribution of their own, as in
        Dream's code.
        """
        return self.model.is_dream or self.top_p < 1 or self.top_k > 0

    @property
    def window(self) -> tuple[int, int]:
        """First canvas position of the running blocks, and the one behind them."""
        return self.blocks[self.running[0]][0], self.blocks[self.running[-1]][1]

    @property
    def attended(self) -> tuple[int, int]:
        """First canvas position of the block of the window that attention goes by, and
        the one behind it.
        """
        first = self.window[0]
        start = first - (first + self.lead) % self.block_length
        return start, min(start + self.block_length, self.length)

    @property
    def is_seeded(self) -> bool:
        """Whether the pass fills the first position of a block from the row before."""
        begins = self.attended[0] == self.window[0]
        seeds = self.model.seeds_blocks and not self.in_rounds
        return seeds and self.step == 0 and begins

    def logits_by_blocks(self) -> torch.Tensor:
        """Raw logits of what a pass sees, where attention goes by blocks."""
        start, _ = self.attended
        return self.model.logits(
            self.canvas[: len(self.seen)],
            self.block_length,
            self.lead,
            start if self.model.is_causal else 0,
        )

    @property
    def seen(self) -> list[int]:
        """The canvas positions that exist for a pass of this window."""
        if self.by_blocks:
            start, stop = self.attended
            return list(range(start if self.is_seeded else stop))
        blocks = len(self.blocks) if self.suffix_blocks is None else self.suffix_blocks
        return list(
            range(
                min(self.window[1] + blocks * self.block_length, self.length, self.cut)
            )
        )

    def passes(self) -> Iterator[int]:
        """The step since a block joined, of each forward pass until the response is
        done.
        """
        last = len(self.blocks) - 1
        while self.model.mask in self.tokens or (
            self.takes_back and self.masked(*self.window)
        ):
            if self.early_stop and self.tokens[-1] in self.stop_token_ids:
                end = len(self.prompt) + len(self.tokens) - 1
                self.canvas[end:] = [self.canvas[end]] * (self.length - end)
                last = self.running[-1]
            while self.running[-1] < last and self.next_joins():
                if self.step:
                    self.running_before = self.running
                    self.steps_before = self.step
                    self.step = 0
                self.running = [
                    b for b in self.running if self.masked(*self.blocks[b])
                ] + [self.running[-1] + 1]
                self.spans = self.block_by_spans()
                if self.masked(*self.window):
                    break
            next(self.spans)
            yield self.step
            self.step += 1

    def block_by_spans(self) -> Iterator[None]:
        """Sets, before each pass of the running block, what SlowFast sampling lets it
        fill and see.
        """
        options = self.slow_fast
        if options is None:
            while True:
                yield
        start, block_end = self.window
        width = int(options["span_window"])
        first = start
        while True:
            lengths: list[int] = []
            length = None
            for _ in range(int(options["span_steps"])):
                self.cut = self.length
                self.may_fill = (first, block_end)
                self.watches = length is None
                self.passing, self.enough = (
                    options["slow_threshold"],
                    int(options["slow_minimum"]),
                )
                yield
                if length is None:
                    lengths.append(1 + max([first, *self.confident]) - start)
                    length = self.stable_length(
                        lengths, width, options["span_variance"]
                    )
            if length is None:
                mean = statistics.mean(lengths[-width:])
                length = (
                    max(round(mean), 1) if self.model.is_dream else math.floor(mean)
                )
            end = start + length
            self.may_fill, self.watches = (first, end), False
            self.passing, self.enough = (
                options["fast_threshold"],
                int(options["fast_minimum"]),
            )
            while self.masked(first, end):
                yield
                self.cut = end
            first = end

    def stable_length(
        self, lengths: list[int], width: int, variance: float
    ) -> int | None:
        """The last of so many, if they vary little."""
        latest = lengths[-width:]
        if len(latest) < width:
            return None
        if self.model.is_dream:
            stable = width == 1 or statistics.variance(latest) <= variance
        else:
            stable = statistics.pvariance(latest) < variance
        return latest[-1] if stable else None

    def candidates(self) -> list[int]:
        """Positions that the running pass may fill, or fill again."""
        first, end = self.may_fill or self.window
        if self.takes_back:
            start = len(self.prompt)
            return [p for p in range(first, end) if self.template[p - start] is None]
        return self.masked(first, end)

    def next_joins(self) -> bool:
        first, end = self.blocks[self.running[-1]]
        left = len(self.masked(first, end))
        return not left or (
            self.block_add_threshold is not None
            and 1 - left / (end - first) >= self.block_add_threshold
        )

    def masked(self, first: int, end: int) -> list[int]:
        return [
            position
            for position in range(first, end)
            if self.canvas[position] == self.model.mask
        ]

    @property
    def counts_of_last_pass(self) -> range:
        """Of each token that the last pass unmasked, how many were unmasked with it."""
        known = sum(map(len, self.order))
        return (
            range(known - len(self.order[-1]) + 1, known + 1)
            if self.order
            else range(0)
        )

    def decided(self, margin: float) -> None:
        self.closest = min(self.closest, margin)

    def largest(
        self, scores: dict[int, float], count: int, floor: float = 1e-2
    ) -> list[int]:
        """The keys of the ``count`` largest scores, of equal ones the first."""
        ordered = sorted(scores, key=lambda key: -scores[key])
        if 0 < count < len(ordered):
            self.decided(gap(scores[ordered[count - 1]], scores[ordered[count]], floor))
        return ordered[:count]

    def fill(self, logits: torch.Tensor, fed: Sequence[int]) -> None:
        """Unmask by the raw logits ``[canvas, vocabulary]`` of the running pass, which
        was fed some positions.
        """
        self.predict(logits, fed)
        self.choose()

    def predict(self, logits: torch.Tensor, fed: Sequence[int]) -> None:
        self.computed.append(list(fed))
        self.logits = logits
        self.alone = self.is_seeded or self.begins_alone()
        self.predicted = self.candidates()
        if self.alone and not self.fills_computed:
            self.predicted = [self.window[0]]
        of_window = (
            self.masked(self.predicted[0], self.window[1])
            if self.predicts_window
            else self.predicted
        )
        self.prior = (
            self.density(self.certainty_sigma)
            if self.certainty_sigma is not None
            else None
        )
        self.held = self.held_to_constraint(of_window) if self.plain_constraint else {}
        """The tokens of the pass's predictions that the constraint asks for, by canvas
        position.
        """
        if self.fills_computed:
            self.predicted = [
                p for p in self.predicted if not self.row(p).isnan().any()
            ]

    def choose(self) -> None:
        """Unmask some of the positions that were predicted."""
        if self.watches:
            self.watch()
        if self.is_seeded:
            self.commit([self.measure(self.window[0], self.unmasking)])
            return
        scored = [self.score(p) for p in self.predicted]
        scored = [entry for entry in scored if entry.confidence > -math.inf]
        scored.sort(key=lambda s: (-s.confidence, s.position))
        num_masked = len(self.candidates())
        if self.takes_back:
            self.keep_most_confident(scored)
            return
        if self.unmasking == "origin" and not self.alone:
            self.commit(
                [entry for entry in scored if entry.confidence < self.ratio(num_masked)]
            )
            return
        if self.alone:
            count = 1
        elif self.parallel:
            least = (
                self.count_by_schedule(num_masked)
                if self.steps_per_block
                else self.tokens_per_step or 0
            )
            count = max(self.count_by_rule(scored), least)
        else:
            count = self.tokens_per_step or self.count_by_schedule(num_masked)
        self.decide_between(scored, count)
        chosen = scored[:count]
        if self.parallel and not self.alone:
            first, end = self.needed()
            inside = [entry for entry in scored if first <= entry.position < end]
            if inside and inside[0] not in chosen:
                self.decide_between(inside, 1)
                chosen.append(inside[0])
        self.commit(chosen)

    def keep_most_confident(self, scored: list[Scored]) -> None:
        """Fill masks among the most confident, and take back the others."""
        masks = self.masks_of[self.running[0]]
        steps = self.steps_of[self.running[0]]
        share = torch.tensor(1 - (self.step + 1) / steps, dtype=torch.float32)
        left = int(masks * share)
        count = len(scored) - left
        self.decide_between(scored, count)
        taken_back = []
        for entry in sorted(scored[count:], key=lambda entry: entry.position):
            token = self.canvas[entry.position]
            if token != self.model.mask:
                taken_back.append((entry.position, token))
                self.canvas[entry.position] = self.model.mask
        remasked = self.traces.setdefault("remasked_per_step", [])
        remasked.append(taken_back)
        masked = self.masked(*self.window)
        self.commit([entry for entry in scored[:count] if entry.position in masked])

    def decide_between(self, scored: list[Scored], count: int) -> None:
        if 0 < count < len(scored) and not all(
            self.comes_last(entry.token) for entry in scored[count - 1 : count + 1]
        ):
            self.decided(gap(scored[count - 1].confidence, scored[count].confidence))

    def commit(self, chosen: list[Scored]) -> None:
        for _, position, token, token_gap in chosen:
            self.canvas[position] = token
            self.decided(token_gap)
        self.order.append(sorted(scored.position for scored in chosen))

    def needed(self) -> tuple[int, int]:
        """Where a pass with a rule fills one position at least."""
        if self.unscheduled and self.window_alone and self.begins_masked():
            return self.window[0], self.window[0] + 1
        return next(
            self.blocks[b] for b in self.running if self.masked(*self.blocks[b])
        )

    def watch(self) -> None:
        """Remember where SlowFast sampling sees how far the model is confident."""
        measured = {p: self.measured(p) for p in self.predicted}
        bound = self.slow_fast["span_threshold"]
        self.confident = [
            p for p, confidence in measured.items() if confidence >= bound
        ]
        for confidence in measured.values():
            self.decided(gap(confidence, bound))

    def ratio(self, num_masked: int) -> float:
        """The probability of each position in a step of ``origin``."""
        steps = self.steps_of[self.running[0]]
        if self.step >= steps - 1 or not self.dream_sampler:
            return self.count_by_schedule(num_masked) / num_masked
        return float(dream_share(steps, self.step))

    def count_by_schedule(self, num_masked: int) -> int:
        steps = self.steps_of[self.running[0]]
        if self.step >= steps - 1:
            return num_masked
        if self.dream_sampler:
            return int(num_masked * dream_share(steps, self.step))
        masks = self.masks_of[self.running[0]]
        if self.model.rounds and not self.takes_back:
            counts = rounded_counts(masks, steps)
            return counts[self.step] if self.step < len(counts) else num_masked
        count, rest = divmod(masks, steps)
        return count + (self.step < rest)

    def begins_alone(self) -> bool:
        """Whether the pass fills the window's first position alone, unless the block
        has but one pass.
        """
        in_blocks = self.window_alone or (
            len(self.blocks) > 1 and not self.tokens_per_step
        )
        counted = self.tokens_per_step or self.steps_per_block
        several_passes = self.steps_of[self.running[0]] > 1 or (
            self.parallel and not counted
        )
        return (
            self.begins_masked()
            and not self.takes_back
            and in_blocks
            and several_passes
            and not self.unscheduled
        )

    def begins_masked(self) -> bool:
        """Whether Dream begins a window whose first position is masked."""
        first = self.window[0]
        return (
            self.dream_sampler
            and self.step == 0
            and bool(self.masked(first, first + 1))
        )

    def held_to_constraint(self, predicted: list[int]) -> dict[int, int]:
        """The tokens at ``predicted`` of the most probable way to complete the
        response, by canvas position.
        """
        constraint = self.plain_constraint
        start = len(self.prompt)
        stop = self.window[1]
        canvas = self.canvas[start : start + self.gen_length][: stop - start]
        ends = constraint.accepted
        for token in reversed(self.template[len(canvas) :]):
            ends = constraint.before(ends, token)
        rows = torch.zeros(
            len(canvas), constraint.following.shape[1], dtype=torch.float64
        )
        places = [
            p - start
            for p in predicted
            if p < start + len(canvas) and not self.row(p).isnan().any()
        ]
        for place, token in enumerate(canvas):
            if token != self.model.mask:
                rows[place] = -math.inf
                rows[place, token] = 0.0
            elif place in places:
                rows[place] = self.constrained_scores(start + place)
        tokens = {}
        for place, row in zip(
            places, constraint.totals(rows, ends)[places], strict=True
        ):
            (best, second), (token, _) = row.topk(2)
            self.decided(gap(float(best), float(second)))
            tokens[start + place] = int(token)
        return tokens

    def constrained_scores(self, position: int) -> torch.Tensor:
        """What a constraint adds up, for each token."""
        row = self.row(position)
        if self.draws_tempered and self.temperature > 0:
            tempered = row / self.temperature
            row = self._filtered(tempered)
            row = torch.where(row > torch.finfo(row.dtype).min, row, tempered - 1e6)
        row = self.noisy(row, position)
        row = torch.where(row == -math.inf, RULED_OUT, row)
        if position < self.first_end:
            row[self.stop_token_ids] = -math.inf
        return row

    def density(self, sigma: float) -> list[float]:
        """How much of what is near each position of the response is known. All before
        the response is; what lies behind it counts as its last position does."""
        known = [token != self.model.mask for token in self.canvas[len(self.prompt) :]]
        size = len(known)
        known = [True] * size + known + known[-1:] * size
        weights = {
            d: math.exp(-(d**2) / (2 * sigma**2)) for d in range(-3 * size, 3 * size)
        }
        total = sum(weights.values())
        return [
            sum(weights[size + p - j] for j in range(3 * size) if known[j]) / total
            for p in range(size)
        ]

    def measured(self, position: int) -> float:
        """The confidence of a position by the running policy, or its token's
        probability where that is no confidence; as if nothing were held back."""
        instead = {
            "entropy": "maskgit_plus",
            "sequential": "maskgit_plus",
            "low_entropy": "low_confidence",
        }
        return self.measure(
            position, instead.get(self.unmasking, self.unmasking)
        ).confidence

    def score(self, position: int) -> Scored:
        """What the position would become, and its confidence by prior and policy; −∞ if
        it is held back.
        """
        scored = self.measure(position, self.unmasking)
        if self.held_back(position, scored.token):
            return scored._replace(confidence=-math.inf)
        weight = self.prior[position - len(self.prompt)] if self.prior else 1.0
        noise = (
            -math.log(-math.log(self.order_noise(self.forward, position)))
            if self.alg_temp
            else 0.0
        )
        return scored._replace(
            confidence=scored.confidence * weight + self.alg_temp * noise
        )

    def measure(self, position: int, policy: str) -> Scored:
        row = untempered = self.row(position)
        assert not row.isnan().any(), f"position {position} was not predicted"
        if self.draws_tempered:  # LLaDA's confidence is of the plain softmax
            row = self._filtered(
                row / self.temperature if self.temperature > 0 else row
            )
        # Gumbel-max: argmax of exp(logits) / (-log u)^T
        (best, second), tokens = self.noisy(row, position).topk(2)
        token = int(tokens[0])
        token_gap = gap(float(best), float(second))
        held = self.held.get(position)
        if held is not None:
            token, token_gap = held, math.inf
        if self.confidence_eos_eot_inf:
            row, untempered = row.clone(), untempered.clone()
            row[self.every_end] = untempered[self.every_end] = -math.inf
        plain, p = untempered.softmax(-1), row.softmax(-1)
        top = p.topk(2).values
        noise = (
            self.order_noise(self.forward, position) if self.order_noise else math.nan
        )
        confidence: Any = {
            "low_confidence": plain[token],
            "maskgit_plus": p[token],
            "p2": p[token],
            "topk_margin": top[0] - top[1]
            if held is None or p[token] == top[0]
            else p[token] - top[0],
            "entropy": (p * (p + 1e-10).log()).sum(),
            "low_entropy": (plain * (plain + 1e-10).log()).sum(),
            "sequential": -position,
            "random": noise,
            "origin": noise,
        }[policy]
        if self.comes_last(token):
            confidence = {
                "entropy": -DOUBT,
                "low_entropy": -DOUBT,
                "topk_margin": -1.0,
            }.get(policy, confidence)
        return Scored(float(confidence), position, token, token_gap)

    def comes_last(self, token: int) -> bool:
        """Whether a token is filled in after all others."""
        return self.confidence_eos_eot_inf and token in self.every_end

    def row(self, position: int) -> torch.Tensor:
        """The logits that predict a position."""
        shift = self.verifies or self.is_seeded or self.model.shifts
        row = self.logits[max(position - shift, 0)].clone()
        for token, number in self.logit_bias.items():
            row[token] += number
        if position < self.last_given:
            row[self.stop_token_ids] = -math.inf
        if position < self.first_end:
            row[[*self.stop_token_ids, *self.every_end]] = -math.inf
        if self.logits_eos_inf:
            row[list(self.model.end_tokens)] = -math.inf
        return row

    def noisy(self, row: torch.Tensor, position: int) -> torch.Tensor:
        score = row.double()
        if self.uniform is not None:
            temperature = (
                1.0 if self.draws_tempered else self.temperature
            )  # such rows are tempered already
            score = (
                score
                - temperature * (-self.uniform(self.forward, position).log()).log()
            )
            score[self.model.mask] = -math.inf
        return score

    def held_back(self, position: int, token: int) -> bool:
        ends = self.model.end_tokens if self.delay_eos else ()
        if token not in ends or any(end in self.tokens for end in ends):
            return False
        return self.canvas[position - 1] == self.model.mask

    def count_by_rule(self, scored: list[Scored]) -> int:
        """How many of the positions, in order of confidence, a rule of parallel
        unmasking lets through.
        """
        doubts = [
            -entry.confidence for entry in scored
        ]  # of some policies the entropies, ascending
        if self.factor is not None:
            values = [(n + 1) * (1 + d) for n, d in enumerate(doubts, 1)]
            bound = self.factor
            strict = True
        elif self.entropy_bound is not None:  # the last of a set is its largest
            sums = [sum(doubts[:n]) for n in range(len(doubts))]
            values = [
                DOUBT if n and doubts[n] == DOUBT else total
                for n, total in enumerate(sums)
            ]
            bound, strict = self.entropy_bound, False
        elif self.entropy_budget is not None:
            values, bound, strict = list(accumulate(doubts)), self.entropy_budget, True
        elif self.entropy_threshold is not None:
            values, bound = doubts, self.entropy_threshold
            strict = self.model.exceeds_entropy
        elif self.slow_fast is not None:
            values, bound, strict = doubts, -self.passing, False
        elif self.threshold is not None:
            values, bound, strict = doubts, -self.threshold, self.strict
        else:
            values, bound, strict = doubts, -self.margin, False
        for value in values:
            self.decided(gap(value, bound))
        passing = [
            n
            for n, value in enumerate(values, 1)
            if value < bound or (value == bound and not strict)
        ]
        if passing and len(passing) >= self.enough:
            return max(passing)
        none = self.model.exceeds_entropy and self.entropy_threshold is not None
        return 0 if none else min(1, len(scored))

    def _filtered(self, row: torch.Tensor) -> torch.Tensor:
        """The fewest likeliest tokens that have more than ``top_p`` together, and of
        those the ``top_k`` best.
        """
        ordered, tokens = row.sort(descending=True, stable=True)
        count = len(row)
        if self.top_p < 1:
            totals = ordered.softmax(-1).double().cumsum(0)
            count = min(count, 1 + int((totals <= self.top_p).sum()))
            for total in totals[:count].tolist():
                self.decided(
                    10 * gap(total, self.top_p)
                )  # sums are exact to more digits
        if 0 < self.top_k < count:
            self.decided(10 * gap(*ordered[self.top_k - 1 : self.top_k + 1].tolist()))
            count = self.top_k
        return torch.full_like(row, torch.finfo(row.dtype).min).index_copy(
            0, tokens[:count], ordered[:count]
        )
