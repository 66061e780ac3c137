"""ES-dLLM's plans and pages as pure functions of a request and its progress."""

from dataclasses import replace

import pytest
import torch

from dllm_engine.model_executor.unmasking.rules import PARALLEL_RULES
from dllm_engine.scheduler.page_layout import PageKind, PoolGeometry
from dllm_engine.scheduler.request import DecodingSpec, ParallelRule, Span
from dllm_engine.scheduler.step_plan import RefreshState, RetainedCopy, RowRule, Scope, StepPlan
from tests.support.plans import cache_of, engine_options, longest_demand, page_demand, pages_of, spec_of
from tests.support.plans import plans_of as plans_of_method

UPDATE, REUSE = RefreshState.UPDATE, RefreshState.REUSE
NONE, WRITE, READ = RetainedCopy.NONE, RetainedCopy.WRITE, RetainedCopy.READ
GEOMETRY = PoolGeometry(page_size=4, num_layers=8, num_kv_heads=2, head_dim=8, hidden_size=32, total_kv_heads=2)
"""A page holds four tokens, or four rows of features."""


def spec(shifts_logits: bool = False, **options) -> DecodingSpec:
    cache = cache_of("es_dllm", **options)
    return spec_of(gen_length=20, steps=20, shifts_logits=shifts_logits, cache=cache)


def plans_of(request: DecodingSpec, steps: tuple[int, ...]) -> list[StepPlan]:
    return plans_of_method(request, "es_dllm", steps)


def test_what_a_step_computes():
    # Blocks of 8, so that the clock of a block's first step is 0, 8 and 16.
    plans = plans_of(spec(block_refresh_interval=3, prompt_refresh_interval=5), (7, 7, 6))
    whole, block = (UPDATE, Scope.ALL, Span(0, 30)), (10, 18)
    assert [(plan.state, plan.scope, plan.span) for plan in plans[:7]] == [
        whole,
        (REUSE, Scope.ACTIVE, block),
        (REUSE, Scope.ACTIVE, block),
        (UPDATE, Scope.ACTIVE, block),
        (REUSE, Scope.ACTIVE, block),
        (UPDATE, Scope.PROMPT, (0, 18)),
        (UPDATE, Scope.ACTIVE, block),
    ]
    assert [plan.skips for plan in plans[:7]] == [plan.state is REUSE for plan in plans[:7]]
    assert [plan.state for plan in plans[7:14]] == [REUSE, UPDATE, UPDATE, REUSE, UPDATE, REUSE, REUSE]
    assert {plan.span for plan in plans[7:14]} == {(18, 26), (0, 26)}  # at the clock of 10
    assert all(plan.read == plan.retained == 30 and plan.retained_copy is NONE for plan in plans)


def test_a_blocks_first_step_also_feeds_what_was_unmasked_last():
    plans = plans_of(spec(), (7, 7, 6))
    firsts = [plans[0], plans[7], plans[14]]
    assert [plan.rows for plan in firsts] == [RowRule.ALL, RowRule.FROM_LAST_UNMASKED, RowRule.FROM_LAST_UNMASKED]
    assert [plan.max_rows for plan in firsts] == [30, 16, 12]
    assert all(plan.rows is RowRule.ALL and plan.max_rows == plan.span.size for plan in plans if plan not in firsts)


@pytest.mark.parametrize("steps", [20, 10, 3])
def test_the_clock_jumps_where_a_block_is_complete_early(steps):
    plans = plans_of(replace(spec(block_refresh_interval=8), steps=steps), (3, 2, 1))
    assert [plan.state for plan in plans] == [UPDATE, REUSE, REUSE, UPDATE, REUSE, UPDATE]


def test_dream_feeds_the_rows_before_those_it_predicts():
    plans = plans_of(spec(shifts_logits=True, prompt_refresh_interval=9), (7, 7, 6))
    assert [plan.span for plan in plans[:2]] == [(0, 30), (9, 17)]
    assert [plan.span for plan in plans[7:10]] == [(17, 25), (0, 25), (17, 25)]
    assert plans[1].window == plans[1].quota.candidates == (10, 18)


def test_a_threshold_must_be_exceeded():
    request = replace(spec(), parallel=ParallelRule("threshold", 0.9))
    assert {plan.quota.parallel for plan in plans_of(request, (3, 2, 1))} == {ParallelRule("exceeded_threshold", 0.9)}
    exceeded = PARALLEL_RULES["exceeded_threshold"](torch.tensor([0.875, 0.75, 0.5]), 0.75)
    assert exceeded.tolist() == [True, False, False]


def test_without_an_indicator_no_row_is_skipped_and_blocks_begin_with_the_whole_canvas():
    plans = plans_of(spec(indicator="none", block_refresh_interval=256, prompt_refresh_interval=256), (7, 7, 6))
    assert not any(plan.skips for plan in plans)
    assert [i for i, plan in enumerate(plans) if plan.scope is Scope.ALL] == [0, 7, 14]
    assert {plan.span for plan in plans if plan.scope is Scope.ACTIVE} == {(10, 18), (18, 26), (26, 30)}


@pytest.mark.parametrize("delay", [0, 2])
def test_eviction_copies_once_per_block_and_reads_the_copy_until_its_end(delay):
    plans = plans_of(spec(retention_ratio=0.5, update_delay=delay, prompt_refresh_interval=3), (7, 7, 6))
    copies = [NONE] * delay + [WRITE] + [READ] * (6 - delay)
    assert [plan.retained_copy for plan in plans] == copies * 2 + copies[:6]
    writes = [plan for plan in plans if plan.retained_copy is WRITE]
    assert all(plan.state is UPDATE and not plan.skips and plan.read == 30 for plan in writes)
    # Half of what is outside a block of eight, eight and four.
    assert [plan.num_copied for plan in writes] == [11, 11, 13]
    assert {plan.read for plan in plans if plan.retained_copy is READ} == {19, 17}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {PageKind.KV: [8] * 8, PageKind.FEATURES: [0, 5, 5, 0, 0, 0, 0, 0]}),
        ({"indicator": "query", "keep_schedule": [[1, 0], [0.5, 0.5]]}, {PageKind.FEATURES: [0, 0, 0, 0, 5, 0, 0, 0]}),
        ({"indicator": "key"}, {}),
        ({"indicator": "none"}, {}),
        ({"alpha": 1.0}, {}),  # change does not count, so nothing is remembered
        ({"alpha": 1.0, "retention_ratio": 0.5}, {PageKind.RETAINED: [5] * 8}),  # 11 + 8 tokens
    ],
)
def test_pages_of_a_block(options, expected):
    pages = pages_of(spec(**options), "es_dllm", 0, GEOMETRY)
    assert pages == {PageKind.KV: [8] * 8} | expected


@pytest.mark.parametrize("options", [{}, {"retention_ratio": 0.5}, {"retention_ratio": 0.0}, {"indicator": "none"}])
def test_no_request_needs_more_than_the_longest(options):
    engine = engine_options("es_dllm", **options)
    longest = longest_demand(engine, GEOMETRY, 30)
    demands = []
    for gen_length in range(1, 30):
        for block_length in range(1, gen_length + 1):
            lengths = {"prompt_length": 30 - gen_length, "gen_length": gen_length, "steps": gen_length}
            request = spec_of(**lengths, block_length=block_length, cache=engine.cache)
            demands.append(page_demand(request, engine, GEOMETRY))
    assert max(demands) == longest


def test_layers_that_drop_rows():
    assert cache_of("es_dllm").cuts(32) == {4: 0.5, 8: 0.25}
    assert cache_of("es_dllm").cuts(4) == {0: 0.5, 1: 0.25}
    assert cache_of("es_dllm", indicator="none").cuts(32) == {}
    # Two depths of one layer: the deeper one.
    assert cache_of("es_dllm", keep_schedule=[[1, 0], [0.5, 0.3], [0.2, 0.4]]).cuts(2) == {0: 0.2}
