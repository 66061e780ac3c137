"""Probabilities of a decision's fields, against the enumeration of
all accepted texts.
"""

import math
import random

import numpy as np
import pytest

from dllm_engine.constraints.decision import Decision
from dllm_engine.constraints.graph import Graph, edges_between
from dllm_engine.model_executor.constraints.accepted_texts import AcceptedTexts
from dllm_engine.model_executor.constraints.running_decision import RunningDecision
from tests.oracles.decisions import decide, given_masked
from tests.support.random_decisions import STOP_TOKEN, listed, random_decision

ENDS = frozenset({3, 7})


@pytest.mark.parametrize("seed", range(100))
def test_a_pass_is_given_what_earlier_ones_committed(seed):
    decision, fields, literals = random_decision(random.Random(seed), most_fields=4)
    rng = np.random.default_rng(seed)
    passes, num_passes = int(rng.integers(1, 6)), 0
    running = RunningDecision(AcceptedTexts(decision), ENDS, passes)
    canvas = [*decision.template]
    committed = {}
    while not running.is_complete:
        before = running.answers
        logits = rng.normal(0, 3, (len(canvas), STOP_TOKEN))
        plain = decide(fields, literals, given_masked(canvas, logits), ENDS, committed)
        positions = [i for i, token in enumerate(canvas) if token is None]
        written, options = running.commit(
            positions, logits[positions][:, running.columns], with_logprobs=True
        )
        assert written.keys() <= {*positions}
        assert all(
            np.exp(values).sum() == pytest.approx(1) for _, values in options.values()
        )
        assert options.keys() == written.keys()
        if running.is_complete and not before:
            # Each token's log-probability is that after the tokens before it.
            terms = [
                values[ids == written[p]].max() for p, (ids, values) in options.items()
            ]
            assert math.exp(sum(terms)) == pytest.approx(plain.probability)
        for position, token in written.items():
            canvas[position] = token
        for name in running.answers.keys() - before:
            # One of them may list a value that is impossible by now.
            own = listed(running.answers[name])
            expected = plain.probabilities[name]
            assert own | dict.fromkeys(expected.keys() - own, 0.0) == pytest.approx(
                expected | dict.fromkeys(own.keys() - expected, 0.0), abs=1e-6
            )
            committed[name] = start, tokens = plain.spellings[name]
            assert canvas[start : start + len(tokens)] == [*tokens]
        now = running.answers.keys() - before
        later = fields.keys() - running.answers
        assert written
        assert (
            min(plain.sureness[n] for n in now)
            >= max((plain.sureness[n] for n in later), default=0) - 1e-9
        )
        num_passes += 1
    assert num_passes <= min(passes, len(fields))
    assert None not in canvas


def test_tokens_of_one_text_count_together():
    graph = Graph(np.array([1]), edges_between([0, 0, 0], [10, 11, 12], 1, field=0))
    decision = Decision(graph, ["f"], [None], [b"a", b"a", b"b"], 5, [False], 10)
    running = RunningDecision(AcceptedTexts(decision), ENDS, passes=1)
    running.commit([0], np.zeros((1, len(running.columns))))
    assert listed(running.answers["f"]) == pytest.approx({"a": 2 / 3, "b": 1 / 3})
