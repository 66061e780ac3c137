"""ES-dLLM's plans as pure functions of a request and its progress."""

import torch

from dllm_engine.model_executor.unmasking.rules import PARALLEL_RULES
from dllm_engine.scheduler.request import ParallelRule
from dllm_engine.scheduler.step_plan import RefreshState, RetainedCopy, StepPlan
from tests.support.plans import cache_of, plans_of, spec_of

UPDATE, REUSE = RefreshState.UPDATE, RefreshState.REUSE
NONE, WRITE, READ = RetainedCopy.NONE, RetainedCopy.WRITE, RetainedCopy.READ


def plans(parallel: ParallelRule | None = None, **options) -> list[StepPlan]:
    """Of blocks of 8, 8 and 4 tokens, which take 7, 7 and 6 steps."""
    spec = spec_of(gen_length=20, steps=20, parallel=parallel, cache=cache_of("es_dllm", **options))
    return plans_of(spec, "es_dllm", (7, 7, 6))


def test_a_threshold_must_be_exceeded():
    made = plans(ParallelRule("threshold", 0.9))
    assert {plan.quota.parallel for plan in made} == {ParallelRule("exceeded_threshold", 0.9)}
    exceeded = PARALLEL_RULES["exceeded_threshold"](torch.tensor([0.875, 0.75, 0.5]), 0.75)
    assert exceeded.tolist() == [True, False, False]


def test_layers_that_drop_rows():
    assert cache_of("es_dllm").cuts(32) == {4: 0.5, 8: 0.25}
    assert cache_of("es_dllm").cuts(4) == {0: 0.5, 1: 0.25}
    assert cache_of("es_dllm", indicator="none").cuts(32) == {}
    # Two depths of one layer: the deeper one.
    assert cache_of("es_dllm", keep_schedule=[[1, 0], [0.5, 0.3], [0.2, 0.4]]).cuts(2) == {0: 0.2}
