"""Attention over pages, on the CPU, against its formula in float64."""

import subprocess
import sys

import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm_engine.kernels.paged_attention import paged_attention
from tests.kernels import checks
from tests.kernels.checks import TOLERANCE, error, paged_case


@st.composite
def paged_arguments(draw: st.DrawFn) -> dict:
    num_requests = draw(st.integers(1, 4))
    kv_heads, sharing = draw(st.sampled_from([(1, 1), (4, 1), (2, 2), (1, 4), (2, 7)]))
    length = st.one_of(st.integers(0, 3), st.integers(0, 2000))
    # Few values, so that requests of equal shape meet in a batch.
    uniform = st.sampled_from(draw(st.lists(length, min_size=1, max_size=2))).map(
        lambda n: [n] * kv_heads
    )
    ragged = st.lists(length, min_size=kv_heads, max_size=kv_heads)
    lengths = draw(st.sampled_from([uniform, ragged]))
    return {
        "rows": draw(
            st.lists(
                st.sampled_from([0, 1, 5, 33]),
                min_size=num_requests,
                max_size=num_requests,
            ).filter(any)
        ),
        "retained": draw(
            st.lists(lengths, min_size=num_requests, max_size=num_requests)
        ),
        "heads": kv_heads * sharing,
        "dim": draw(st.sampled_from([8, 32, 96])),
        "page_size": draw(st.sampled_from([1, 4, 16])),
        "packed": draw(st.booleans()),
        "dtype": draw(st.sampled_from(list(TOLERANCE))),
        "seed": draw(st.integers(0, 1000)),
    }


@given(arguments=paged_arguments(), attend_fresh=st.booleans(), limited=st.booleans())
def test_equals_the_formula_and_reads_only_what_is_retained(
    arguments, attend_fresh, limited
):
    case = paged_case(**arguments)
    lengths = case.tokens.head_len
    if not arguments["packed"] and bool((lengths == lengths[:, :1]).all()):
        by_token = case.tokens._replace(token_lens=lengths[:, 0].contiguous())
        case = case._replace(tokens=by_token)
    limits = case.limits() if limited else None
    expected, expected_lse = checks.paged_attention(case, attend_fresh, limits)
    for lse in (case.q.new_empty(case.q.shape[:2], dtype=torch.float32), None):
        longest = max(arguments["rows"])
        out = paged_attention(
            *case, attend_fresh=attend_fresh, max_seqlen=longest, limits=limits, lse=lse
        )
        assert out.dtype == case.q.dtype
        assert not out.isnan().any()
        assert error(out, expected) < TOLERANCE[case.q.dtype]
        if lse is not None:
            torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_kernels_work_on_a_cpu_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
from dllm_engine.check.cases import BY_HEADS, OTHERS, Draw, Sizes
from dllm_engine.kernels.token_statistics import token_statistics
for case in (BY_HEADS | OTHERS).values():
    case(Draw(Sizes(4, 2, 32, 64, 150, 8), torch.float32, torch.float32, "cpu"))
try:
    token_statistics.triton
except ImportError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "need Triton" in ran.stdout
