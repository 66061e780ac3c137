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
from tests.oracles.decisions import decide, decide_in_passes, given_masked
from tests.support.random_decisions import (
    STOP_TOKEN,
    assert_fields_are,
    listed,
    random_decision,
)

ENDS = frozenset({3, 7})


@pytest.mark.parametrize("seed", range(100))
def test_a_pass_is_given_what_earlier_ones_committed(seed):
    decision, fields, literals = random_decision(random.Random(seed), most_fields=4)
    rng = np.random.default_rng(seed)
    passes, length = int(rng.integers(1, 6)), len(decision.template)
    logits = rng.normal(0, 3, (passes, length, STOP_TOKEN))
    drawn = iter(logits)
    template = list(decision.template)
    by_pass = decide_in_passes(
        fields, literals, template, lambda _: next(drawn), ENDS, passes
    )
    running = RunningDecision(AcceptedTexts(decision), ENDS, passes)
    for own_logits, expected in zip(logits, by_pass, strict=False):
        before = running.answers
        positions = [i for i, token in enumerate(template) if token is None]
        written, options = running.commit(
            positions, own_logits[positions][:, running.columns], with_logprobs=True
        )
        assert written.keys() == options.keys() <= {*positions}
        for _, values in options.values():
            assert np.exp(values).sum() == pytest.approx(1)
        if len(by_pass) == 1:
            # Each token's log-probability is that after the tokens before it.
            terms = [
                values[ids == written[p]].max() for p, (ids, values) in options.items()
            ]
            masked = given_masked(decision.template, own_logits)
            plain = decide(fields, literals, masked, ENDS)
            assert math.exp(sum(terms)) == pytest.approx(plain.probability)
        for position, token in written.items():
            template[position] = token
        assert running.answers.keys() - before == expected.keys()
        assert_fields_are(running.answers, expected)
    assert running.is_complete
    assert None not in template


def test_tokens_of_one_text_count_together():
    graph = Graph(np.array([1]), edges_between([0, 0, 0], [10, 11, 12], 1, field=0))
    decision = Decision(graph, ["f"], [None], [b"a", b"a", b"b"], 5, [False], 10)
    running = RunningDecision(AcceptedTexts(decision), ENDS, passes=1)
    running.commit([0], np.zeros((1, len(running.columns))))
    assert listed(running.answers["f"]) == pytest.approx({"a": 2 / 3, "b": 1 / 3})
