"""Attention over pages, on the CPU, against its formula in float64."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.kernels.paged_attention import paged_attention, paged_attention_reference, write_slots
from tests.support.paged_cases import TOLERANCE, error, paged_case

SEMANTICS = [(True, False), (True, True), (False, False), (False, True)]
"""(attend_fresh, causal)"""


@st.composite
def paged_arguments(draw: st.DrawFn, longest: int = 2000) -> dict:
    num_requests = draw(st.integers(1, 4))
    kv_heads, sharing = draw(st.sampled_from([(1, 1), (4, 1), (2, 2), (1, 4), (2, 7)]))
    length = st.one_of(st.integers(0, 3), st.integers(0, longest))
    # Few values, so that requests of equal shape meet in a batch.
    uniform = st.sampled_from(draw(st.lists(length, min_size=1, max_size=2))).map(lambda n: [n] * kv_heads)
    ragged = st.lists(length, min_size=kv_heads, max_size=kv_heads)
    lengths = draw(st.sampled_from([uniform, ragged]))
    return {
        "rows": draw(
            st.lists(st.sampled_from([0, 1, 5, 33]), min_size=num_requests, max_size=num_requests).filter(any)
        ),
        "retained": draw(st.lists(lengths, min_size=num_requests, max_size=num_requests)),
        "heads": kv_heads * sharing,
        "dim": draw(st.sampled_from([8, 32, 96])),
        "page_size": draw(st.sampled_from([1, 4, 16])),
        "packed": draw(st.booleans()),
        "dtype": draw(st.sampled_from(list(TOLERANCE))),
        "seed": draw(st.integers(0, 1000)),
    }


@given(arguments=paged_arguments(), semantics=st.sampled_from(SEMANTICS), return_lse=st.booleans())
@settings(max_examples=80, deadline=None)
def test_equals_the_formula_and_reads_only_what_is_retained(arguments, semantics, return_lse):
    case = paged_case(**arguments)
    attend_fresh, causal = semantics
    slots = () if attend_fresh else (case.k_slots, case.v_slots)
    expected, expected_lse = paged_attention_reference(*case.tables, *slots, attend_fresh=attend_fresh, causal=causal)
    result = paged_attention(*case.tables, *slots, attend_fresh=attend_fresh, causal=causal, return_lse=return_lse)
    out, lse = result if return_lse else (result, None)
    assert out.dtype == case.q.dtype
    assert not out.isnan().any()
    assert error(out, expected) < TOLERANCE[case.q.dtype]
    if lse is not None:
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@given(arguments=paged_arguments(longest=40))
@settings(max_examples=30, deadline=None)
def test_writes_keys_and_values_to_their_own_slots_and_nowhere_else(arguments):
    case = paged_case(**arguments)
    expected = []
    for values, pages, slots in ((case.k, case.k_pages, case.k_slots), (case.v, case.v_pages, case.v_slots)):
        written = pages.clone()
        for row, head in (slots >= 0).nonzero().tolist():
            written[divmod(int(slots[row, head]), pages.shape[1])] = values[row, head]
        expected.append(written)
    paged_attention(*case.tables, case.k_slots, case.v_slots, attend_fresh=False)
    torch.testing.assert_close((case.k_pages, case.v_pages), tuple(expected), rtol=0, atol=0, equal_nan=True)


def test_keys_may_be_written_without_values():
    case = paged_case([4], [[9, 9]], heads=2, dim=8)
    values = case.v_pages.clone()
    paged_attention(*case.tables, case.k_slots, attend_fresh=False)
    torch.testing.assert_close(case.v_pages, values, rtol=0, atol=0, equal_nan=True)


def test_formula_worked_by_hand():
    """A retained token with score 0 and a fresh one with score ln 3: weights 1/4 and 3/4."""
    case = paged_case([1], [[1]], heads=1, dim=4)
    page = int(case.page_tables[0, 0])
    case.q[0, 0] = torch.tensor([1.0, 0, 0, 0])
    case.k_pages[page, 0] = 0
    case.v_pages[page, 0] = torch.tensor([4.0, 0, 0, 0])
    case.k[0, 0] = torch.tensor([2 * torch.log(torch.tensor(3.0)), 0, 0, 0])
    case.v[0, 0] = torch.tensor([0.0, 4, 0, 0])
    for result in (
        paged_attention(*case.tables, attend_fresh=True, return_lse=True),
        paged_attention_reference(*case.tables, attend_fresh=True),
    ):
        torch.testing.assert_close(result[0].float(), torch.tensor([[[1.0, 3, 0, 0]]]))
        torch.testing.assert_close(result[1].float(), torch.log(torch.tensor([[4.0]])))


def test_without_retained_tokens_it_is_bidirectional_attention():
    case = paged_case([7, 7, 3], [[0, 0]] * 3, heads=4, dim=16)
    expected = bidirectional_attention(case.q, case.k, case.v, case.cu_seqlens.tolist())
    torch.testing.assert_close(paged_attention(*case.tables, attend_fresh=True), expected)


def test_what_log_sum_exp_is_for_joining_attention_over_parts_of_the_keys():
    case = paged_case([5, 6], [[40, 40], [3, 3]], heads=4, dim=16)
    whole = paged_attention(*case.tables, attend_fresh=True)
    none = torch.zeros_like(case.head_len)
    fresh, fresh_lse = paged_attention(*case.tables[:-1], none, attend_fresh=True, return_lse=True)
    pages, pages_lse = paged_attention(*case.tables, attend_fresh=False, return_lse=True)
    share = (pages_lse - torch.logaddexp(fresh_lse, pages_lse)).exp()[..., None]
    torch.testing.assert_close(pages * share + fresh * (1 - share), whole)


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_with_nothing_to_attend_to_is_zero(packed):
    case = paged_case([3, 2], [[0, 4], [0, 0]], heads=4, dim=8, packed=packed)
    for return_lse in (False, True):
        result = paged_attention(*case.tables, attend_fresh=False, return_lse=return_lse)
        out = result[0] if return_lse else result
        assert not out[3:].any()
        assert not out[:3, :2].any()
        assert out[:3, 2:].all()
    assert (result[1][3:] == -torch.inf).all()
    # Five rows as the last of four tokens: the first comes before all of them.
    case = paged_case([5], [[4, 4]], heads=2, dim=8, packed=packed)
    out = paged_attention(*case.tables, attend_fresh=False, causal=True)
    assert not out[0].any()
    assert out[1:].all()


def sdpa_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    calls = []
    attention = F.scaled_dot_product_attention

    def counted(q: torch.Tensor, *arguments: object, **named: object) -> torch.Tensor:
        calls.append(q.shape)
        return attention(q, *arguments, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return calls


@pytest.mark.parametrize("attend_fresh", [True, False])
def test_requests_of_equal_shape_share_one_call(monkeypatch, attend_fresh):
    calls = sdpa_calls(monkeypatch)
    case = paged_case([8] * 6, [[30, 30]] * 6, heads=4, dim=8)
    paged_attention(*case.tables, attend_fresh=attend_fresh)
    assert calls == [(6, 2, 16, 8)]


@pytest.mark.parametrize(("bytes_at_once", "sizes"), [(1, [1] * 7), (20_000, [2, 2, 2, 1]), (1 << 20, [7])])
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_requests_whose_keys_would_not_stay_in_a_cache_take_turns(monkeypatch, bytes_at_once, sizes, semantics):
    attend_fresh, causal = semantics
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(sys.modules["dllm_engine.kernels.paged_attention"], "_COPIED_BYTES", bytes_at_once)
    case = paged_case([8] * 7, [[60, 60]] * 7, heads=4, dim=8)
    expected = paged_attention_reference(*case.tables, attend_fresh=attend_fresh, causal=causal)
    calls = sdpa_calls(monkeypatch)
    out = paged_attention(*case.tables, attend_fresh=attend_fresh, causal=causal)
    assert calls == [(size, 2, 16, 8) for size in sizes]
    torch.testing.assert_close(out.double(), expected[0], atol=1e-5, rtol=1e-5)
    of_lse = paged_attention(*case.tables, attend_fresh=attend_fresh, causal=causal, return_lse=True)
    torch.testing.assert_close([x.double() for x in of_lse], list(expected), atol=1e-5, rtol=1e-5)


def test_a_batch_takes_one_call_per_shape_in_it(monkeypatch):
    calls = sdpa_calls(monkeypatch)
    case = paged_case([8, 20, 8, 20, 8], [[30, 30], [0, 0], [30, 30], [0, 0], [31, 31]], heads=2, dim=8)
    paged_attention(*case.tables, attend_fresh=True)
    assert sorted(calls) == [(1, 2, 8, 8), (2, 2, 8, 8), (2, 2, 20, 8)]


def test_requests_with_budgets_per_head_share_one_call_where_they_have_equal_rows(monkeypatch):
    calls = sdpa_calls(monkeypatch)
    case = paged_case([8, 8, 8], [[3, 17], [20, 1], [0, 5]], heads=4, dim=8, packed=True)
    paged_attention(*case.tables, attend_fresh=True)
    assert calls == [(3, 2, 16, 8)]


def test_rows_may_be_views_of_one_projection_and_bounds_a_list():
    case = paged_case([5, 7], [[6, 6], [9, 9]], heads=4, dim=16)
    expected = paged_attention(*case.tables, attend_fresh=True)
    fused = torch.cat((case.q, case.k, case.v), dim=1)
    case.q, case.k, case.v = fused.split((4, 2, 2), dim=1)
    tables = case.tables
    out = paged_attention(*tables[:3], case.cu_seqlens.tolist(), *tables[4:], attend_fresh=True)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (4, 1, 8)}, r"k \[4, 1, 8\], v \[4, 2, 8\] do not belong together"),
        ({"q": (5, 2, 8)}, r"q \[5, 2, 8\]"),
        ({"q": (4, 3, 8)}, "3 query heads are not a multiple of 2 KV heads"),
        ({"k_pages": (9, 8, 4), "v_pages": (9, 8, 4)}, r"k_pages \[9, 8, 4\]"),
        ({"v_pages": (9, 4, 8)}, r"v_pages \[9, 4, 8\]"),
        ({"page_tables": (2, 3)}, r"page_tables \[2, 3\]"),
        ({"head_len": (1, 3)}, r"head_len \[1, 3\]"),
        ({"head_start": (2, 2)}, r"head_start \[2, 2\]"),
        ({"token_stride": (2,)}, r"token_stride \[2\]"),
    ],
)
def test_shapes_that_do_not_belong_together_are_named(change, message):
    case = paged_case([4], [[2, 2]], heads=2, dim=8)
    for name, shape in change.items():
        setattr(case, name, getattr(case, name).new_zeros(shape))
    with pytest.raises(ValueError, match=message):
        paged_attention(*case.tables, attend_fresh=True)


def test_other_errors_say_what_is_wrong():
    case = paged_case([4], [[2, 2]], heads=2, dim=8)
    with pytest.raises(ValueError, match="k_slots and v_slots belong to attend_fresh=False"):
        paged_attention(*case.tables, case.k_slots, attend_fresh=True)
    with pytest.raises(ValueError, match=r"slots \[4, 1\] do not belong together"):
        write_slots(case.k, case.k_pages, case.k_slots[:, :1])
    for bounds in ([0, 3], [1, 4]):
        with pytest.raises(ValueError, match="does not divide 4 rows"):
            paged_attention(*case.tables[:3], bounds, *case.tables[4:], attend_fresh=True)
    with pytest.raises(ValueError, match="retains tokens up to slot 200 of page tables of 16 slots"):
        paged_attention(*case.tables[:-1], torch.full_like(case.head_len, 100), attend_fresh=True)
    case.k_pages = case.k_pages.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="a page is not contiguous"):
        paged_attention(*case.tables, attend_fresh=True)
    case = paged_case([4], [[2, 2]], heads=2, dim=8)
    case.k_pages = case.k_pages.half()
    with pytest.raises(ValueError, match=r"differ in type: .*float16"):
        paged_attention(*case.tables, attend_fresh=True)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("packed", [False, True])
def test_operators_are_registered_correctly(semantics, packed):
    """Schema, fake implementation and tracing, as torch.compile and graphs need them."""
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    case = paged_case([3, 3, 5], [[6, 6], [6, 6], [9, 2]], heads=4, dim=8, packed=packed)
    for return_lse in (False, True):
        arguments = (*case.tables, *semantics, return_lse, None, None)
        torch.library.opcheck(torch.ops.dllm.paged_attention.default, arguments, test_utils=utils)
    torch.library.opcheck(
        torch.ops.dllm.write_slots.default, (case.k, case.k_pages.nan_to_num(), case.k_slots), test_utils=utils
    )


def test_kernels_work_on_a_cpu_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
from dllm_engine.kernels import eviction, features, paged_attention, similarity, unmask, voting
x = torch.randn(4, 2, 8)
pages, table, heads = torch.randn(3, 2, 8), torch.zeros(1, 1).int(), torch.tensor([[0, 1]]).int()
paged_attention.paged_attention(
    x, x, x, [0, 4], pages, pages, table, heads, torch.tensor([2]).int(), torch.ones(1, 2).int(), attend_fresh=True
)
eviction.mean_query_scores(x, x)
voting.voting_scores(x, x, torch.zeros(4, 2))
similarity.similarity_sums(x, pages, torch.zeros(4, 2).long())
features.read_features(features.feature_rows(torch.randn(3, 2, 2, 8), 8), torch.zeros(4).long())
unmask.token_statistics(x[0], -1, True, True)
try:
    unmask.token_statistics_with_triton(x[0], -1, True, True)
except ImportError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "need Triton" in ran.stdout
