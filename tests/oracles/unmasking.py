"""What a forward pass unmasks, as slow, plain Python: schedules, policies and the rules of parallel unmasking.

Readings where the papers leave room:

* Blocks may be unlike in length: the last takes what is left of the response. Steps are shared by length.
* Dream in blocks: a block's first pass fills its first position alone, outside the schedule and whatever the rule,
  unless the block has but one pass.
* A ``threshold`` is ignored by policies that measure no probability (``entropy``, ``topk_margin``).
* ``delay_eos``: a position that would get an end token counts as the least confident of all while the position before
  it is masked and the response has no end token.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tests.oracles.models import PlainModel, steps_per_block

RULES = ("threshold", "factor", "entropy_bound", "margin")


class Scored(NamedTuple):
    """A masked position and what it would become."""

    confidence: float
    position: int
    token: int
    gap: float
    """By how much the token won."""


def gap(a: float, b: float, floor: float = 1e-2) -> float:
    """The relative difference of two numbers that are not compared to more digits than float32 has."""
    return abs(a - b) / max(abs(a), abs(b), floor)


@dataclass
class Decoding:
    """The canvas of one request and what has been done to it."""

    model: PlainModel
    prompt: list[int]
    gen_length: int
    block_length: int
    steps: int | None = None
    unmasking: str = "low_confidence"
    threshold: float | None = None
    factor: float | None = None
    entropy_bound: float | None = None
    margin: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    end_tokens: tuple[int, ...] = ()
    """With ``delay_eos``: the tokens that are held back."""
    fills_first_alone: bool = True
    """Whether Dream's block rule applies."""
    order: list[list[int]] = field(default_factory=list)
    """Canvas positions unmasked per forward pass."""
    computed: list[list[int]] = field(default_factory=list)
    """Canvas positions fed per forward pass."""
    traces: dict[str, list] = field(default_factory=dict)
    """What else a cache method does, under the names of the engine's figures."""
    closest: float = math.inf
    """The smallest relative margin of any decision."""

    def __post_init__(self) -> None:
        self.canvas = self.prompt + [self.model.mask] * self.gen_length
        self.length = len(self.canvas)
        start = len(self.prompt)
        self.blocks = [
            (s, min(s + self.block_length, self.length)) for s in range(start, self.length, self.block_length)
        ]
        if self.unmasking in ("entropy", "topk_margin"):
            self.threshold = None
        self.parallel = any(getattr(self, rule) is not None for rule in RULES)
        if self.steps is None:
            self.steps = self.gen_length

    @property
    def tokens(self) -> list[int]:
        return self.canvas[len(self.prompt) :]

    def masked(self, first: int, end: int) -> list[int]:
        return [position for position in range(first, end) if self.canvas[position] == self.model.mask]

    def steps_of(self, number: int) -> int:
        assert self.steps is not None
        return steps_per_block(self.steps, [end - first for first, end in self.blocks])[number]

    def decided(self, margin: float) -> None:
        self.closest = min(self.closest, margin)

    def fill(self, logits: torch.Tensor, number: int, step: int) -> None:
        """Unmask by the raw logits of all rows that predict block ``number``, in step ``step`` of the block."""
        first, end = self.blocks[number]
        alone = self.model.is_dream and self.fills_first_alone and step == 0
        if alone and (self.parallel or self.steps_of(number) > 1):
            chosen = [self.score(logits, first)]
        else:
            scored = sorted((self.score(logits, p) for p in self.masked(first, end)), key=lambda s: (-s[0], s[1]))
            if self.parallel:
                count = self.count_by_rule(scored)
            else:
                count = self.count_by_schedule(len(scored), end - first, self.steps_of(number), step)
            chosen = scored[:count]
            if 0 < count < len(scored):
                self.decided(gap(scored[count - 1].confidence, scored[count].confidence))
        self.commit(chosen)

    def commit(self, chosen: list[Scored]) -> None:
        for _, position, token, token_gap in chosen:
            self.canvas[position] = token
            self.decided(token_gap)
        self.order.append(sorted(scored.position for scored in chosen))

    def score(self, logits: torch.Tensor, position: int) -> Scored:
        row = logits[max(position - 1, 0) if self.model.is_dream else position]
        assert not row.isnan().any(), f"position {position} was not predicted"
        best, second = row.topk(2).values.tolist()
        token = int(row.argmax())
        if self.held_back(position, token):
            return Scored(-math.inf, position, token, gap(best, second))
        p = (self._filtered(row) if self.model.is_dream else row).softmax(-1)
        top = p.topk(2).values
        confidence = {
            "low_confidence": top[0],
            "maskgit_plus": top[0],
            "topk_margin": top[0] - top[1],
            "entropy": (p * (p + 1e-10).log()).sum(),
        }[self.unmasking]
        return Scored(float(confidence), position, token, gap(best, second))

    def held_back(self, position: int, token: int) -> bool:
        if token not in self.end_tokens or any(end in self.tokens for end in self.end_tokens):
            return False
        return self.canvas[position - 1] == self.model.mask

    def count_by_rule(self, scored: list[Scored]) -> int:
        """How many of the positions, in order of confidence, a rule of parallel unmasking lets through."""
        scored = [entry for entry in scored if entry.confidence > -math.inf]
        confidences = [entry.confidence for entry in scored]
        if self.factor is not None:
            passing = [(n + 1) * (1 - c) for n, c in enumerate(confidences, 1)]
            bound, passes = self.factor, [value < self.factor for value in passing]
        elif self.entropy_bound is not None:
            entropies = [-c for c in confidences]  # ascending, so the last of a set is its largest
            passing = [sum(entropies[:n]) for n in range(len(entropies))]
            bound, passes = self.entropy_bound, [value <= self.entropy_bound for value in passing]
            passing = passing[1:]
        else:
            bound = self.threshold if self.threshold is not None else self.margin
            assert bound is not None
            passing, passes = confidences, [c >= bound for c in confidences]
        for value in passing:
            self.decided(gap(value, bound))
        return max([n for n, passed in enumerate(passes, 1) if passed], default=min(1, len(scored)))

    def count_by_schedule(self, masked: int, block_size: int, in_block: int, step: int) -> int:
        if step >= in_block - 1:
            return masked
        if self.model.is_dream:
            t = torch.linspace(1, 1e-3, in_block + 1)
            return int(masked * (1 - t[step + 1] / t[step]))
        return block_size // in_block + (1 if step < block_size % in_block else 0)

    def _filtered(self, row: torch.Tensor) -> torch.Tensor:
        """The fewest likeliest tokens that have more than ``top_p`` together, and of those the ``top_k`` best."""
        lowest = torch.finfo(row.dtype).min
        if self.top_p < 1:
            p, kept, total = row.softmax(-1), [], 0.0
            for token in p.argsort(descending=True).tolist():
                kept.append(token)
                total += float(p[token])
                self.decided(10 * gap(total, self.top_p))  # sums are exact to more digits
                if total > self.top_p:
                    break
            row = torch.full_like(row, lowest).index_copy(0, torch.tensor(kept), row[kept])
        if self.top_k:
            ordered = row.sort(descending=True)
            last_kept, first_dropped = ordered.values[self.top_k - 1 : self.top_k + 1].tolist()
            if last_kept > lowest:
                self.decided(10 * gap(last_kept, first_dropped))
            kept = ordered.indices[: self.top_k].tolist()
            row = torch.full_like(row, lowest).index_copy(0, torch.tensor(kept), row[kept])
        return row
