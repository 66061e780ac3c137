"""ES-dLLM's plans as pure functions of a request and its progress."""

import pytest
import torch

from dllm_engine.model_executor.unmasking.rules import PARALLEL_RULES
from dllm_engine.scheduler.request import ParallelRule, Span
from dllm_engine.scheduler.step_plan import RefreshState, RetainedCopy, Scope, StepPlan
from tests.support.plans import cache_of, plans_of, spec_of

UPDATE, REUSE = RefreshState.UPDATE, RefreshState.REUSE
NONE, WRITE, READ = RetainedCopy.NONE, RetainedCopy.WRITE, RetainedCopy.READ


def plans(parallel: ParallelRule | None = None, **options) -> list[StepPlan]:
    """Of blocks of 8, 8 and 4 tokens, which take 7, 7 and 6 steps."""
    spec = spec_of(gen_length=20, steps=20, parallel=parallel, cache=cache_of("es_dllm", **options))
    return plans_of(spec, "es_dllm", (7, 7, 6))


def test_what_a_step_computes():
    # The clock of a block's first step is 0, 8 and 16.
    made = plans(block_refresh_interval=3, prompt_refresh_interval=5)
    whole, block = (UPDATE, Scope.ALL, Span(0, 30)), (10, 18)
    assert [(plan.state, plan.scope, plan.span) for plan in made[:7]] == [
        whole,
        (REUSE, Scope.ACTIVE, block),
        (REUSE, Scope.ACTIVE, block),
        (UPDATE, Scope.ACTIVE, block),
        (REUSE, Scope.ACTIVE, block),
        (UPDATE, Scope.PROMPT, (0, 18)),
        (UPDATE, Scope.ACTIVE, block),
    ]
    assert [plan.skips for plan in made[:7]] == [plan.state is REUSE for plan in made[:7]]
    assert [plan.state for plan in made[7:14]] == [REUSE, UPDATE, UPDATE, REUSE, UPDATE, REUSE, REUSE]
    assert {plan.span for plan in made[7:14]} == {(18, 26), (0, 26)}  # at the clock of 10
    assert all(plan.read == plan.retained == 30 and plan.retained_copy is NONE for plan in made)


def test_a_threshold_must_be_exceeded():
    made = plans(ParallelRule("threshold", 0.9))
    assert {plan.quota.parallel for plan in made} == {ParallelRule("exceeded_threshold", 0.9)}
    exceeded = PARALLEL_RULES["exceeded_threshold"](torch.tensor([0.875, 0.75, 0.5]), 0.75)
    assert exceeded.tolist() == [True, False, False]


@pytest.mark.parametrize("delay", [0, 2])
def test_eviction_copies_once_per_block_and_reads_the_copy_until_its_end(delay):
    made = plans(retention_ratio=0.5, update_delay=delay, prompt_refresh_interval=3)
    copies = [NONE] * delay + [WRITE] + [READ] * (6 - delay)
    assert [plan.retained_copy for plan in made] == copies * 2 + copies[:6]
    writes = [plan for plan in made if plan.retained_copy is WRITE]
    assert all(plan.state is UPDATE and not plan.skips and plan.read == 30 for plan in writes)
    # Half of what is outside a block of eight, eight and four.
    assert [plan.num_copied for plan in writes] == [11, 11, 13]
    assert {plan.read for plan in made if plan.retained_copy is READ} == {19, 17}


def test_layers_that_drop_rows():
    assert cache_of("es_dllm").cuts(32) == {4: 0.5, 8: 0.25}
    assert cache_of("es_dllm").cuts(4) == {0: 0.5, 1: 0.25}
    assert cache_of("es_dllm", indicator="none").cuts(32) == {}
    # Two depths of one layer: the deeper one.
    assert cache_of("es_dllm", keep_schedule=[[1, 0], [0.5, 0.3], [0.2, 0.4]]).cuts(2) == {0: 0.2}
