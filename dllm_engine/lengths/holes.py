"""The number of tokens of a hole, chosen by one or two forward passes.

The text behind a hole says how long it is: it is probable behind a hole of the right
length, and improbable behind others. The first pass has one canvas for all lengths: the
text before the hole and masks only. It gives each length L the sum of log-probabilities
of the first tokens of the text behind the hole, L masks behind the text before it, less
L/16: far behind the text, any token is a little probable, and shorter holes would not
be among the best. A length that leads clearly is chosen. Else the second pass has a
canvas for each of the best lengths, with the text behind the hole. The first tokens of
that text are masked:

    score(L) = sum of these tokens' log-probabilities
             + mean over the hole of the likeliest token's log-probability

docs/infill.md compares it with other rules.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dllm_engine.decoding.probe import Logprobs, Probe
from dllm_engine.lengths.forward_passes import Passes

DEFAULT_BUDGET = 64
"""Limit on the tokens of a hole whose request names no budget."""
LARGEST_BUDGET = 256
"""Limit on the tokens of a hole whose length is chosen."""
_BEFORE, _BEHIND = 256, 128
"""Number of tokens before and behind a hole that passes see."""
_JOINED = 4
"""Number of tokens behind a hole that must be probable."""
_COMPARED = 4
"""Number of lengths in the second pass."""
_MEAN_LENGTH = 16
"""Mean of the geometric prior of lengths in the first pass."""
_CLEAR_LEAD = 1.0
"""Lead of a length in the first pass, in nats, that makes the second pass unnecessary.
"""


@dataclass(frozen=True)
class Hole:
    """A hole, the tokens around it, and the lengths that it may have."""

    before: Sequence[int]
    behind: Sequence[int]
    """At least one token."""
    sizes: Sequence[int]

    @property
    def joined(self) -> Sequence[int]:
        return self.behind[:_JOINED]

    def open_probe(self) -> Probe:
        before = [*self.before[-_BEFORE:]]
        places = [
            (len(before) + size + offset, token)
            for size in self.sizes
            for offset, token in enumerate(self.joined)
        ]
        num_masks = max(self.sizes) + len(self.joined)
        masked, tokens = map(list, zip(*places, strict=True))
        return Probe(before + [0] * num_masks, masked, tokens)

    def compared_sizes(self, answer: Logprobs, count: int) -> list[int]:
        """The best lengths by the answer to ``open_probe``, at least ``count``. A
        single one if ``count`` is 1 and it is clearly the best."""
        width = len(self.joined)
        scores = {
            size: sum(answer.tokens[i * width : (i + 1) * width]) - size / _MEAN_LENGTH
            for i, size in enumerate(self.sizes)
        }
        best = sorted(self.sizes, key=lambda size: (-scores[size], size))
        second = scores[best[1]] if len(best) > 1 else -math.inf
        if count == 1 and scores[best[0]] >= second + _CLEAR_LEAD:
            return best[:1]
        return best[: max(count, _COMPARED)]

    def closed_probe(self, size: int) -> Probe:
        before, behind = self.before[-_BEFORE:], self.behind[: _JOINED + _BEHIND]
        first = len(before)
        masked = list(range(first, first + size + len(self.joined)))
        canvas = [*before, *[0] * size, *behind]
        return Probe(canvas, masked, [canvas[position] for position in masked])

    def score(self, size: int, answer: Logprobs) -> float:
        """Score of a length by the answer to ``closed_probe``."""
        sureness = sum(answer.likeliest[:size]) / max(size, 1)
        return sum(answer.tokens[size:]) + sureness


def ranked_lengths(holes: Sequence[Hole], count: int = 1) -> Passes[list[list[int]]]:
    """Lengths of each hole, the best first: at least ``count``, if the hole may have so
    many.
    """
    answers = yield [hole.open_probe() for hole in holes]
    compared = [
        hole.compared_sizes(answer, count)
        for hole, answer in zip(holes, answers, strict=True)
    ]
    pairs = [
        (number, size)
        for number, sizes in enumerate(compared)
        if len(sizes) > 1
        for size in sizes
    ]
    answers = yield [holes[number].closed_probe(size) for number, size in pairs]
    scores = {
        (number, size): holes[number].score(size, answer)
        for (number, size), answer in zip(pairs, answers, strict=True)
    }
    return [
        sorted(sizes, key=lambda size: (-scores.get((number, size), 0.0), size))
        for number, sizes in enumerate(compared)
    ]
