"""Unmasking policies and how many positions a step fills by them."""

import numpy as np
import pytest
import torch

from dllm_engine.model_executor.candidates import BatchCandidates, outcomes_of
from dllm_engine.model_executor.canvas_store import CanvasStore
from dllm_engine.model_executor.denoiser import Denoiser
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.token_prediction import SamplingSettings
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics
from dllm_engine.scheduler.messages import NewRequest
from dllm_engine.scheduler.request import DecodingSpec, ParallelRule, Span
from dllm_engine.scheduler.step_plan import RefreshState, RowRule, Scope, StepPlan, UnmaskQuota

MASK = 99
BLOCK = Span(4, 9)
# Masked positions 4, 5, 7, 8; each statistic orders them differently.
STATISTICS = TokenStatistics(
    token=torch.tensor([40, 50, 70, 80]),
    probability=torch.tensor([0.9, 0.2, 0.3, 0.4]),
    negative_entropy=torch.tensor([-2.0, -0.1, -1.0, -0.5]),
    margin=torch.tensor([0.1, 0.2, 0.8, 0.3]),
    noise=torch.tensor([0.7, 0.6, 0.1, 0.95], dtype=torch.float64),
)
ORDERS = {
    "low_confidence": [4, 8, 7, 5],
    "maskgit_plus": [4, 8, 7, 5],
    "entropy": [5, 8, 7, 4],
    "topk_margin": [7, 8, 5, 4],
    "random": [8, 4, 5, 7],
}


def spec_of(unmasking: str, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0) -> DecodingSpec:
    return DecodingSpec(4, 10, 5, 10, "uniform", unmasking, temperature, top_p, top_k)


def fill_together(*requests: tuple[str, UnmaskQuota], held_back: list[bool] | None = None) -> list:
    """(canvas, positions filled) of each (policy, quota), all in one batch; every request has the same statistics."""
    store = CanvasStore(torch.device("cpu"), MASK)
    denoiser = Denoiser(None, None, None, store, [])
    canvases, plans = [], []
    for number, (unmasking, quota) in enumerate(requests):
        store.open(str(number), NewRequest([1] * 4, spec_of(unmasking), seed=0))
        canvas = store.canvases[str(number)]
        canvas.tokens[6], canvas.masked[6], canvas.known[6] = 60, False, 60
        canvases.append(canvas)
        plans.append(StepPlan(RefreshState.FULL, Scope.ALL, RowRule.ALL, Span(0, 14), 14, BLOCK, quota, 0))
    batch = StepBatch(
        [*"abc"[: len(plans)]],
        plans,
        canvases,
        [14 * i for i in range(len(plans) + 1)],
        torch.arange(14).repeat(len(plans)),
        np.tile(np.arange(14), len(plans)),
        torch.arange(14 * len(plans)),
    )
    candidates = BatchCandidates.of(batch)
    repeated = {name: torch.cat([x] * len(plans)) for name, x in vars(STATISTICS).items() if x is not None}
    if held_back is not None:
        repeated["held_back"] = torch.tensor(held_back * len(plans))
    (outcome,), _ = outcomes_of([[denoiser._fill(candidates, TokenStatistics(**repeated), plans)]], len(plans))
    for canvas, positions, tokens in zip(canvases, outcome.positions, outcome.tokens, strict=True):
        assert tokens == canvas.tokens[positions].tolist()
    return list(zip(canvases, outcome.positions, strict=True))


def fill(unmasking: str, count: int, ratio: float = 0.5, parallel: ParallelRule | None = None):
    (one,) = fill_together((unmasking, UnmaskQuota(BLOCK, count, ratio, parallel)))
    return one


@pytest.mark.parametrize("unmasking", ORDERS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_most_confident_positions_are_filled_with_their_tokens(unmasking, count):
    canvas, filled = fill(unmasking, count)
    expected = sorted(ORDERS[unmasking][:count])
    assert filled == expected
    assert canvas.tokens.tolist()[4:9] == [p * 10 if p in [*expected, 6] else MASK for p in range(4, 9)]
    assert torch.equal(canvas.masked, canvas.tokens == MASK)


def test_count_beyond_the_candidates_fills_all():
    assert fill("low_confidence", 10)[1] == [4, 5, 7, 8]


def test_requests_of_a_batch_keep_to_their_own_policies_and_quotas():
    by_threshold = UnmaskQuota(BLOCK, 1, 0.5, ParallelRule("threshold", 0.4))
    by_chance = UnmaskQuota(BLOCK, 1, 0.65)
    together = fill_together(
        ("low_confidence", by_threshold), ("origin", by_chance), ("low_confidence", UnmaskQuota(BLOCK, 3, 0.5))
    )
    assert [filled for _, filled in together] == [[4, 8], [5, 7], [4, 7, 8]]
    for canvas, filled in together:
        assert canvas.tokens.tolist()[4:9] == [p * 10 if p in [*filled, 6] else MASK for p in range(4, 9)]
        assert canvas.tokens.tolist()[:4] == [1] * 4


def test_what_is_held_back_is_not_filled():
    quota = UnmaskQuota(BLOCK, 2, 0.5)
    held_back = [True, False, False, True]
    threshold = UnmaskQuota(BLOCK, 2, 0.5, ParallelRule("threshold", 0.1))
    together = fill_together(
        ("low_confidence", quota), ("entropy", quota), ("low_confidence", threshold), held_back=held_back
    )
    assert [filled for _, filled in together] == [[5, 7]] * 3
    (nothing,) = fill_together(("low_confidence", threshold), held_back=[True] * 4)
    assert nothing[1] == []


@pytest.mark.parametrize(("ratio", "expected"), [(0.05, []), (0.5, [7]), (0.65, [5, 7]), (1.0, [4, 5, 7, 8])])
def test_origin_draws_each_position_with_the_ratio_as_probability(ratio, expected):
    assert fill("origin", count=1, ratio=ratio)[1] == expected


@pytest.mark.parametrize(
    ("unmasking", "rule", "expected"),
    [
        # Probabilities 0.9, 0.2, 0.3, 0.4 of positions 4, 5, 7, 8.
        ("low_confidence", ParallelRule("threshold", 0.4), [4, 8]),
        ("maskgit_plus", ParallelRule("threshold", 0.95), [4]),
        # (n + 1)(1 - p_n): 0.2, 1.8, 2.8, 4.
        ("low_confidence", ParallelRule("factor", 2.0), [4, 8]),
        ("maskgit_plus", ParallelRule("factor", 3.5), [4, 7, 8]),
        # Entropies 0.1, 0.5, 1, 2 of positions 5, 8, 7, 4: without the largest 0, 0.1, 0.6, 1.6.
        ("entropy", ParallelRule("entropy_bound", 0.3), [5, 8]),
        # Margins 0.1, 0.2, 0.8, 0.3.
        ("topk_margin", ParallelRule("margin", 0.25), [7, 8]),
    ],
)
def test_a_parallel_rule_takes_the_place_of_the_count(unmasking, rule, expected):
    for count in (0, 1, 4):
        canvas, filled = fill(unmasking, count, parallel=rule)
        assert filled == expected
        assert canvas.masked.nonzero()[:, 0].tolist() == [p for p in (4, 5, 7, 8, *range(9, 14)) if p not in expected]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (spec_of("low_confidence"), SamplingSettings(0.0, 1.0, 0, False)),
        # The most likely token survives the filters, and LLaDA's confidence is of the plain softmax.
        (spec_of("low_confidence", top_p=0.9, top_k=5), SamplingSettings(0.0, 1.0, 0, False)),
        (spec_of("low_confidence", 0.7, 0.9, 5), SamplingSettings(0.7, 0.9, 5, False)),
        (spec_of("entropy"), SamplingSettings(0.0, 1.0, 0, False)),
        (spec_of("entropy", top_k=5), SamplingSettings(0.0, 1.0, 5, True)),
        (spec_of("entropy", 0.7), SamplingSettings(0.7, 1.0, 0, True)),
    ],
)
def test_settings_that_make_no_difference_are_shared(spec, expected):
    assert SamplingSettings.of(spec) == expected
