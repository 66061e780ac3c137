"""The search for the most probable texts of fields with a pattern: its answers, and how
much of it there is.
"""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dllm_engine.model_executor.constraints.accepted_texts import (
    AcceptedTexts,
    FieldTexts,
)
from dllm_engine.model_executor.constraints.field_texts import FieldChances
from dllm_engine.model_executor.constraints.running_decision import RunningDecision
from tests.oracles.decisions import decide, given_masked
from tests.support.random_decisions import STOP_TOKEN, listed, random_decision

ENDS = frozenset({3, 7})


def patterns(seed, **settings):
    """A decision with a field of several texts, and what the plain version needs to
    know of it.
    """
    rng = random.Random(seed)
    while True:
        decision, fields, literals = random_decision(rng, most_fields=4)
        if (
            any(values is None for values in decision.values)
            and None in decision.template
        ):
            return replace(decision, **settings), fields, literals


def decided(decision, seed, scale=3.0):
    running = RunningDecision(AcceptedTexts(decision), ENDS, passes=1)
    logits = np.random.default_rng(seed).normal(
        0, scale, (len(decision.template), STOP_TOKEN)
    )
    positions = [i for i, token in enumerate(decision.template) if token is None]
    running.commit(positions, logits[positions][:, running.columns])
    return running.answers, logits


@pytest.mark.parametrize("scale", [0.01, 3.0])
@pytest.mark.parametrize("seed", range(20))
def test_the_first_values_are_the_most_probable_ones(seed, scale):
    decision, fields, literals = patterns(seed, top_k=4)
    answers, logits = decided(decision, seed, scale)
    plain = decide(fields, literals, given_masked(decision.template, logits), ENDS)
    for name, values in zip(fields, decision.values, strict=True):
        if values is None:
            shares = [each["probability"] for each in answers[name]["distribution"]]
            expected = sorted(plain.probabilities[name].values(), reverse=True)[
                : len(shares)
            ]
            assert len(shares) == min(4, len(plain.probabilities[name]))
            assert shares[:-1] == pytest.approx(expected[:-1])
            last = answers[name]["distribution"][-1]
            assert (
                last["probability"] == pytest.approx(expected[-1])
                or last["value"] == answers[name]["value"]
            )


@pytest.mark.parametrize("seed", range(20))
def test_a_search_with_few_beginnings_still_gives_exact_probabilities(
    seed, monkeypatch
):
    decision, fields, literals = patterns(seed, top_k=2, beginnings=2)
    gone_on, choose = [], FieldChances.choose

    def counted(self, state, reached, limit):
        rows, arcs = choose(self, state, reached, limit)
        gone_on.append(len(rows))
        return rows, arcs

    monkeypatch.setattr(FieldChances, "choose", counted)
    answers, logits = decided(decision, seed, scale=0.01)
    plain = decide(fields, literals, given_masked(decision.template, logits), ENDS)
    assert gone_on
    assert max(gone_on) <= 2
    for name, answer in answers.items():
        assert listed(answer) == pytest.approx(
            {value: plain.probabilities[name][value] for value in listed(answer)}
        )


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_each_field_is_answered_once(passes, monkeypatch):
    answered, answer = Counter(), FieldTexts.answer

    def counted(self, *args):
        answered[self] += 1
        return answer(self, *args)

    monkeypatch.setattr(FieldTexts, "answer", counted)
    decision, _, _ = patterns(passes)
    running = RunningDecision(AcceptedTexts(decision), ENDS, passes)
    canvas = [*decision.template]
    rng = np.random.default_rng(passes)
    while not running.is_complete:
        positions = [i for i, token in enumerate(canvas) if token is None]
        written, _ = running.commit(
            positions, rng.normal(0, 3, (len(positions), len(running.columns)))
        )
        for position, token in written.items():
            canvas[position] = token
    assert [*answered.values()] == [1] * sum(
        values is None for values in decision.values
    )
