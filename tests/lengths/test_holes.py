"""Which lengths of a hole the second pass compares."""

import pytest

from dllm_engine.decoding.probe import Logprobs
from dllm_engine.lengths.holes import Hole, ranked_lengths

HOLE = Hole([5], [6], range(6))


@pytest.mark.parametrize(
    ("count", "scores", "compared"),
    [
        (1, [-9.0, -3.1, -2.0, -9.0, -9.0, -9.0], []),
        (1, [-9.0, -3.0, -2.0, -9.0, -9.0, -9.5], [2, 1, 0, 3]),
        (2, [-9.0, -3.0, -2.0, -9.0, -9.0, -9.0], [2, 1, 0, 3]),
        (5, [-9.0, -3.0, -2.0, -9.0, -9.0, -9.5], [2, 1, 0, 3, 4]),
    ],
)
def test_a_length_that_leads_by_a_nat_is_chosen_at_once(count, scores, compared):
    passes = ranked_lengths([HOLE], count)
    (probe,) = next(passes)
    assert probe.masked == [1, 2, 3, 4, 5, 6]
    probes = passes.send([Logprobs(scores, [0.0] * 6)])
    assert probes == [HOLE.closed_probe(size) for size in compared]
    with pytest.raises(StopIteration) as end:
        passes.send(
            [Logprobs([-1.0] * (size + 1), [0.0] * (size + 1)) for size in compared]
        )
    assert end.value.value == [sorted(compared) or [2]]
