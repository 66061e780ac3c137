"""Constrained responses: always accepted, and as without a constraint where it allows everything."""

import random
from itertools import cycle

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.model_executor import token_prediction
from dllm_engine.scheduler.constraints.automaton import Automaton
from tests.oracles.constrained import PlainConstraint
from tests.support import tiny_checkpoints
from tests.support.engines import assert_nothing_left, generate
from tests.support.plans import FULL_METHODS
from tests.support.random_requests import any_text, random_automaton

PROMPT = [3, 1, 4, 1, 5, 9]
ENDS = [11, 23, 42, 77, 101]
NEVER = {tiny_checkpoints.MASK}
ANYTHING = any_text(tiny_checkpoints.VOCAB_SIZE, NEVER)
WAYS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.5, "top_k": 2},
    {"threshold": 0.05},
    {"unmasking": "origin", "steps": 9},
    {"entropy_bound": 2.0, "block_add_threshold": 0.3},
    {"slow_fast": {"span_steps": 1, "fast_threshold": 0.1}},
    {"early_stop": True, "threshold": 0.1},
    {"delay_eos": True},
    {"logprobs": 3},
    {"logit_bias": dict.fromkeys(ENDS, 50.0)},
    {"logits_eos_inf": True, "alg_temp": 0.3},
    {"confidence_eos_eot_inf": True, "threshold": 0.1},
    {"response_template": [None] * 7 + [5] + [None] * 10 + [6] * 3},
]


def constrained(automaton: Automaton, **asked) -> DiffusionParams:
    length = {} if "response_template" in asked else {"gen_length": 21}
    asked = {"block_length": 8, "stop_token_ids": ENDS, "ignore_eos": True} | length | asked
    return DiffusionParams(**asked, extra_args={"constraint": automaton.packed})


def some_automata(count: int, asked: dict) -> list[Automaton]:
    """That accept some response to these requests."""
    draw, found = random.Random(3), []
    template = asked.get("response_template", [None] * 21)
    while len(found) < count:
        automaton = random_automaton(draw, tiny_checkpoints.VOCAB_SIZE, NEVER)
        plain = PlainConstraint(automaton.packed, ENDS)
        states = plain.accepted
        for token in reversed(template):
            states = plain.before(states, token)
        if 0 in states:
            found.append(automaton)
    return found


@pytest.mark.parametrize(
    ("method", "model"), list(zip(FULL_METHODS, cycle(["tiny_llada", "tiny_dream"]), strict=False))
)
def test_every_response_is_accepted(engines, request, method, model):
    llm = engines.shared(request.getfixturevalue(model), cache_method=method)
    cases = [
        (automaton, way | {"seed": 5})
        for way in WAYS
        if not (method == "es_dllm" and way.keys() & {"unmasking", "entropy_bound"})
        for automaton in some_automata(2, way)
    ]
    outputs = generate(llm, [PROMPT] * len(cases), [constrained(automaton, **way) for automaton, way in cases])
    for output, (automaton, _) in zip(outputs, cases, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert PlainConstraint(automaton.packed, ENDS).accepts(tokens)
        assert len(tokens) == 21 or tokens[-1] in ENDS
        assert output.outputs[0].finish_reason == "stop"
    assert_nothing_left(llm)


def test_a_head_that_makes_logits_of_few_rows_at_once_gives_the_same(engines, tiny_llada, monkeypatch):
    llm = engines(tiny_llada)
    params = [constrained(automaton, **way, seed=5) for way in WAYS[:4] for automaton in some_automata(2, way)]
    whole = generate(llm, [PROMPT] * len(params), params)
    monkeypatch.setattr(token_prediction, "MAX_LOGITS_PER_CHUNK", 5 * tiny_checkpoints.VOCAB_SIZE)
    parts = generate(llm, [PROMPT] * len(params), params)
    assert [o.outputs[0].token_ids for o in parts] == [o.outputs[0].token_ids for o in whole]
