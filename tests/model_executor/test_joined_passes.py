"""Requests with a cache, decisions and probes in the forward passes of one step."""

import random

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.decoding.probe import Probe
from dllm_engine.model_executor.probes import masked_logprobs
from tests.support.engines import generate, runner_of, scheduler_of
from tests.support.plans import FULL_METHODS
from tests.support.random_decisions import (
    assert_same_decisions,
    decision_params,
    random_decision,
)
from tests.support.stepped_engines import run_in_steps

PROMPTS = [[(5 * i * j + i + 1) % 100 for i in range(17 + 3 * j)] for j in range(3)]
PROBES = [
    Probe([*range(1, 20)], [3, 7, 7], [50, 60, 61]),
    Probe([5], [0], [9]),
    Probe([*range(30, 70)], [], []),
]
OWN_LOOPS = {"es_dllm", "dllm_cache", "maskkv", "d2_cache"}
"""Methods whose passes run through the layers in a loop of their own."""


@pytest.mark.parametrize("method", ["none", *FULL_METHODS])
def test_they_compute_what_they_compute_alone(engines, tiny_llada, method, monkeypatch):
    llm = engines(tiny_llada, cache_method=method)
    scheduler, rank = scheduler_of(llm), runner_of(llm).rank
    decision, *_ = random_decision(random.Random(0))
    prompts = [*PROMPTS, [*range(60, 80)]]
    params = [
        DiffusionParams(gen_length=24, block_length=8, steps=12, ignore_eos=True)
    ] * 3 + [DiffusionParams(**decision_params(decision, passes=2))]
    alone = [
        generate(llm, [prompt], own)[0]
        for prompt, own in zip(prompts, params, strict=True)
    ]
    answers_alone = masked_logprobs(rank, PROBES)
    results, num_forwards = [], []
    forward = type(rank.model).forward

    def counted(self, *inputs):
        num_forwards[-1] += 1
        return forward(self, *inputs)

    def add_probes():
        num_forwards.append(0)
        results.append(scheduler.probes.add(str(len(results)), PROBES))

    monkeypatch.setattr(type(rank.model), "forward", counted)
    add_probes()
    run = run_in_steps(llm, prompts, params, after_step=add_probes)
    scheduler.probes.drop_all()
    assert run.tokens == [list(output.outputs[0].token_ids) for output in alone]
    assert_same_decisions([run.outputs[-1].outputs[0]], [alone[-1].outputs[0]])
    for result in results[:-1]:
        answers, _ = result.result()
        for answer, own in zip(answers, answers_alone, strict=True):
            assert answer.tokens == pytest.approx(own.tokens, abs=1e-4)
            assert answer.likeliest == pytest.approx(own.likeliest, abs=1e-4)
    assert num_forwards[0] == (2 if method in OWN_LOOPS else 1)
    assert (max(num_forwards) == 1) == (method not in OWN_LOOPS)
