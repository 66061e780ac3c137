"""The length of a response, chosen by DAEDAL's first stage (arXiv 2508.00819).

The response begins as ``start`` masks. A forward pass over prompt and masks predicts a
token for each mask. The last ``tail`` masks whose likeliest token is the end token
count: E = (sum of the end token's probabilities there) / ``tail``, also if there are
fewer such masks. While E < ``threshold``, the response grows to
``LengthRule.next_length`` and is predicted again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from dllm_engine.decoding.probe import Logprobs, Probe
from dllm_engine.lengths.forward_passes import Passes
from dllm_engine.request_options.layout import LengthRule


class ChosenLength(NamedTuple):
    """A length, and the cost of choosing it."""

    length: int
    passes: int = 0
    rows: int = 0
    """Number of canvas positions in all passes."""


@dataclass(frozen=True)
class OpenResponse:
    """A response whose length is to be chosen."""

    prompt: Sequence[int]
    end_token: int
    first: int
    """The fewest tokens. The choice begins with this length."""
    most: int
    rule: LengthRule

    def probe(self, length: int) -> Probe:
        begin = len(self.prompt)
        masked = list(range(begin, begin + length))
        return Probe([*self.prompt, *[0] * length], masked, [self.end_token] * length)

    def is_enough(self, answer: Logprobs) -> bool:
        """Return True if the response of a ``probe`` is long enough."""
        by_place = zip(reversed(answer.tokens), reversed(answer.likeliest), strict=True)
        ends = (logprob for logprob, likeliest in by_place if logprob == likeliest)
        total = sum(map(math.exp, islice(ends, self.rule.tail)))
        return total / self.rule.tail >= self.rule.threshold


def chosen_lengths(responses: Sequence[OpenResponse]) -> Passes[list[ChosenLength]]:
    """The length of each response. Each pass has the canvases of all responses that may
    grow.
    """
    chosen = [ChosenLength(response.first) for response in responses]
    growing = [*range(len(responses))]
    while growing := [i for i in growing if chosen[i].length < responses[i].most]:
        probes = [responses[i].probe(chosen[i].length) for i in growing]
        answers = yield probes
        still_growing = []
        for i, probe, answer in zip(growing, probes, answers, strict=True):
            response, (length, passes, rows) = responses[i], chosen[i]
            if not response.is_enough(answer):
                length = response.rule.next_length(length, response.most)
                still_growing.append(i)
            chosen[i] = ChosenLength(length, passes + 1, rows + len(probe.canvas))
        growing = still_growing
    return chosen
