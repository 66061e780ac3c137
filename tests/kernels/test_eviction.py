"""Scoring, choosing and storing retained tokens, on the CPU, against the formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.kernels.eviction import mean_query_scores, select_retained, write_retained
from tests.kernels import formulas
from tests.kernels.checks import check_mean_query_scores, check_write_retained
from tests.support.paged_cases import TOLERANCE


@given(
    block_rows=st.integers(1, 40),
    candidates=st.one_of(st.integers(0, 3), st.integers(0, 2000)),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (14, 2)]),
    dim=st.sampled_from([8, 64, 96]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_scores_equal_the_formula(**arguments):
    check_mean_query_scores(mean_query_scores, **arguments)


def test_scores_worked_by_hand():
    """Two rows, two query heads on one KV head: means (2, 0) and (0, 3), and a key (1, 10)."""
    q = torch.tensor([[[1.0, 0], [0, 2]], [[3, 0], [0, 4]]])
    k = torch.tensor([[[1.0, 10]]])
    assert mean_query_scores(q, k).tolist() == [32.0]
    assert formulas.mean_query_scores(q, k).tolist() == [32.0]


def test_scores_of_parts_of_the_heads_add_up():
    q, k = torch.randn(8, 6, 16), torch.randn(20, 2, 16)
    parts = mean_query_scores(q[:, :3], k[:, :1]) + mean_query_scores(q[:, 3:], k[:, 1:])
    torch.testing.assert_close(parts, mean_query_scores(q, k))


@pytest.mark.parametrize(
    ("scores", "count", "pool_kernel_size", "retained"),
    [
        ([1, 9, 2, 3, 8], 2, 1, [1, 4]),
        ([1, 9, 2, 0, 0, 0], 3, 3, [0, 1, 2]),
        ([1, 2, 3, 4, 9], 3, 5, [2, 3, 4]),
        ([-5, -1, -9, -9], 3, 3, [0, 1, 2]),  # padding is below any score
        ([3, 1], 2, 7, [0, 1]),
        ([3, 1], 0, 3, []),
        ([], 0, 3, []),
    ],
)
def test_selection(scores, count, pool_kernel_size, retained):
    assert select_retained(torch.tensor(scores, dtype=torch.float32), count, pool_kernel_size).tolist() == retained


@given(
    scores=st.lists(st.integers(-20, 20), min_size=1, max_size=200),
    pool_kernel_size=st.sampled_from([1, 3, 5, 9]),
    fraction=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_selection_takes_the_highest_pooled_scores_in_ascending_order(scores, pool_kernel_size, fraction):
    count = int(len(scores) * fraction)
    retained = select_retained(torch.tensor(scores, dtype=torch.float32), count, pool_kernel_size).tolist()
    half = pool_kernel_size // 2
    pooled = [max(scores[max(0, i - half) : i + half + 1]) for i in range(len(scores))]
    assert retained == sorted(set(retained))
    assert sorted(pooled[i] for i in retained) == sorted(pooled)[len(scores) - count :]


@given(
    retained=st.integers(0, 60),
    held=st.integers(0, 20),
    kv_heads=st.sampled_from([1, 2, 4]),
    slots_per_page=st.sampled_from([1, 3, 8, 64]),
    dtype=st.sampled_from(list(TOLERANCE)),
    table_type=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_retained_rows_fill_the_slots_behind_those_held_and_nothing_else(**arguments):
    check_write_retained(write_retained, **arguments)


def test_errors_name_what_does_not_fit():
    x, pages = torch.zeros(4, 2, 8), torch.zeros(3, 8, 8)
    with pytest.raises(ValueError, match=r"q \[4, 3, 8\] and k \[4, 2, 8\] do not belong together"):
        mean_query_scores(torch.zeros(4, 3, 8), x)
    with pytest.raises(ValueError, match=r"q \[0, 2, 8\] has no rows"):
        mean_query_scores(x[:0], x)
    with pytest.raises(ValueError, match=r"count=5 of scores \[4\]"):
        select_retained(torch.zeros(4), 5, 3)
    with pytest.raises(ValueError, match="pool_kernel_size=2 is not a positive odd number"):
        select_retained(torch.zeros(4), 1, 2)
    rows, table = torch.arange(4), torch.arange(1)
    with pytest.raises(ValueError, match=r"v \[3, 2, 8\], rows \[4\] do not belong together"):
        write_retained(x, x[:3], rows, pages, pages.clone(), table)
    with pytest.raises(ValueError, match=r"k_pages \[3, 4, 16\]"):
        write_retained(x, x, rows, pages.view(3, 4, 16), pages.clone().view(3, 4, 16), table)
    with pytest.raises(ValueError, match="a page is not contiguous"):
        write_retained(x, x, rows, pages.transpose(1, 2), pages.clone(), table)
    with pytest.raises(ValueError, match=r"table \[1\] of pages of 4 slots cannot hold 4 tokens of 2 KV heads"):
        write_retained(x, x, rows, pages[:, :4].contiguous(), pages[:, :4].clone(), table)
    with pytest.raises(ValueError, match="of pages of 8 slots cannot hold 6 tokens"):
        write_retained(x, x, rows, pages, pages.clone(), table, 2)


def test_operators_are_registered_correctly():
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    x = torch.randn(5, 2, 8)
    torch.library.opcheck(torch.ops.dllm.mean_query_scores.default, (torch.randn(3, 4, 8), x), test_utils=utils)
    pages = torch.randn(2, 3, 4, 8)
    arguments = (x, x, torch.tensor([0, 2, 4]), *pages.unbind(0), torch.tensor([2, 0]))
    torch.library.opcheck(torch.ops.dllm.write_retained.default, arguments, test_utils=utils)
