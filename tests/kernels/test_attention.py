"""Bidirectional attention against its formula in float64, and which library computes it
and attention over pages.

FlashAttention computes on CUDA alone. On a CPU its calls are stood in for by the
formula over what they
are given, so that shapes, types, groups and lengths are checked.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm_engine import DiffusionParams
from dllm_engine.check import cases
from dllm_engine.check.cases import Draw, Sizes
from dllm_engine.kernels import attention, paged_attention
from dllm_engine.kernels.attention import (
    attend_with_sdpa,
    choose_backend,
    choose_paged_flash,
)
from tests.kernels import checks
from tests.kernels.checks import TOLERANCE, error, flash_stand_in
from tests.support.engines import responses, runner_of, start_engine
from tests.support.fake_cuda_graphs import record_steps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def inputs(lengths, heads, kv_heads, device="cpu", dtype=torch.float32, dim=16, seed=0):
    """Queries, keys and values as views of one projection, as layers hand them out;
    bounds, twice.
    """
    rows = torch.randn(
        sum(lengths),
        heads + 2 * kv_heads,
        dim,
        generator=torch.Generator().manual_seed(seed),
    )
    parts = rows.to(device, dtype).split((heads, kv_heads, kv_heads), dim=1)
    bounds = [0, *itertools.accumulate(lengths)]
    return *parts, bounds, torch.tensor(bounds, dtype=torch.int32, device=device)


@pytest.fixture
def log(monkeypatch):
    """Lines that tell which library was chosen."""
    lines = []
    monkeypatch.setattr(
        attention.logger, "info", lambda line, *values: lines.append(line % values)
    )
    return lines


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (4, 1)]),
    dim=st.sampled_from([8, 16, 64]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
def test_equals_the_formula(lengths, heads, dim, dtype, seed):
    num_heads, num_kv_heads = heads
    q, k, v, *bounds = inputs(
        lengths, num_heads, num_kv_heads, dtype=dtype, dim=dim, seed=seed
    )
    out = attention.bidirectional_attention(q, k, v, *bounds)
    assert out.shape == q.shape
    assert out.dtype == dtype
    assert (
        error(out, checks.bidirectional_attention(q, k, v, bounds[0]))
        < TOLERANCE[dtype]
    )


@pytest.mark.parametrize("method", ["dual", "dkv", "es_dllm"])
def test_requests_that_need_no_pages_take_one_call_beside_others(
    monkeypatch, engines, tiny_dream, method
):
    # The third request starts while the second one reuses what it has in pages.
    llm = engines(tiny_dream, cache_method=method, page_size=4, max_num_seqs=2)
    asked = (
        [list(range(1, 1 + length)) for length in (13, 4, 9)],
        [DiffusionParams(gen_length=length, ignore_eos=True) for length in (3, 8, 8)],
    )
    expected = responses(llm, *asked)
    flash = flash_stand_in(monkeypatch)
    monkeypatch.setattr(
        attention, "_attend", choose_backend("flash", CUDA, torch.bfloat16, 16)
    )
    assert responses(llm, *asked) == expected
    assert {2, 1} <= set(flash.calls)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "version", "chosen", "reason"),
    [
        ("auto", CUDA, torch.bfloat16, 128, 3, "flash", ""),
        (
            "auto",
            CUDA,
            torch.float32,
            128,
            3,
            "sdpa",
            "needs a CUDA device and float16 or bfloat16, here cuda",
        ),
        (
            "auto",
            CPU,
            torch.bfloat16,
            128,
            None,
            "sdpa",
            "",
        ),
        (
            "auto",
            CUDA,
            torch.bfloat16,
            264,
            3,
            "sdpa",
            "needs heads of a multiple of 8 and at most 256 numbers",
        ),
        ("flash", CUDA, torch.float16, 256, 2, "flash", ""),
        ("flash", CUDA, torch.bfloat16, 12, 3, None, "here 12"),
        (
            "flash",
            CUDA,
            torch.bfloat16,
            128,
            None,
            None,
            "needs a GPU that vLLM's FlashAttention is built for",
        ),
        ("sdpa", CUDA, torch.bfloat16, 128, 3, "sdpa", ""),
    ],
)
def test_which_backend_is_chosen(
    monkeypatch, log, name, device, dtype, head_dim, version, chosen, reason
):
    flash_stand_in(monkeypatch, version)
    if chosen is None:
        with pytest.raises(
            ValueError, match=f"dense_attention='{name}' needs"
        ) as refused:
            choose_backend(name, device, dtype, head_dim)
        assert reason in str(refused.value)
        assert str(refused.value).endswith("; leave it at 'auto'")
    else:
        assert (choose_backend(name, device, dtype, head_dim) is attend_with_sdpa) == (
            chosen == "sdpa"
        )
        if device == CPU:
            assert not log  # it has no choice
        else:
            (line,) = log
            assert line.startswith(f"Dense attention: {chosen}")
            assert reason in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_engine_that_cannot_have_its_backend_does_not_start(tiny_llada):
    with pytest.raises(Exception, match="dense_attention='flash' needs a CUDA device"):
        start_engine(tiny_llada, dense_attention="flash")


@pytest.mark.parametrize(
    ("settings", "recorded"),
    [
        (
            {
                "cache_method": "dual",
                "cache_options": {"refresh": "near", "near_tokens": 4},
            },
            True,
        ),
        ({"cache_method": "dllm_cache"}, True),
        ({"cache_method": "es_dllm"}, True),
        ({"cache_method": "maskkv"}, False),
    ],
)
def test_engines_answer_the_same_with_flash_over_pages(
    monkeypatch, engines, tiny_llada, settings, recorded
):
    """Also where a recorded step is padded with requests that have no tokens."""
    asked = (
        [[3] * 17, [5, 6] * 4, [9, 8, 7]],
        DiffusionParams(gen_length=16, block_length=8, ignore_eos=True),
    )
    llm = engines(tiny_llada, page_size=16, **settings)
    monkeypatch.setattr(paged_attention, "_flash", None)
    expected = responses(llm, *asked)
    flash = flash_stand_in(monkeypatch)
    monkeypatch.setattr(
        paged_attention, "_flash", choose_paged_flash(CUDA, torch.bfloat16, 16, 16)
    )
    if recorded:
        recorder = record_steps(runner_of(llm), monkeypatch)
    assert responses(llm, *asked) == expected
    assert bool(flash.calls) == (
        settings["cache_method"] != "maskkv"
    )  # whose heads have tokens of their own
    if recorded:
        assert recorder.num_replayed > 0


@pytest.mark.parametrize(
    ("device", "dtype", "page_size", "version", "reason"),
    [
        (CUDA, torch.float16, 16, 2, None),
        (CPU, torch.bfloat16, 32, 3, "needs a CUDA device"),
        (CUDA, torch.bfloat16, 24, 3, "needs a page_size of a multiple of 16, here 24"),
        (CUDA, torch.bfloat16, 64, 3, "needs a page_size below 64, here 64"),
        (CUDA, torch.bfloat16, 64, 2, None),
        (CUDA, torch.bfloat16, 32, 4, "needs FlashAttention 2 or 3, and vLLM takes 4"),
    ],
)
def test_when_flash_over_pages_is_chosen(
    monkeypatch, log, device, dtype, page_size, version, reason
):
    flash_stand_in(monkeypatch, version)
    assert (choose_paged_flash(device, dtype, 128, page_size) is None) == (
        reason is not None
    )
    if device == CPU:
        assert not log  # it has no choice
    else:
        (line,) = log
        assert (reason or f"flash {version} where it applies") in line


def test_what_no_request_has_in_pages_is_not_used():
    """Heads have different lengths, and the first page, which is nobody's, holds NaN."""
    draw = Draw(Sizes(2, 2, 8, 0, 0, 4), torch.float32, torch.float32, "cpu")
    q, k, v, bounds, tokens = cases.paged_case(draw, [3], [[5, 2]], packed=True)
    k_pages, v_pages = (
        torch.cat([torch.full_like(pages[:1], torch.nan), pages])
        for pages in (tokens.k_pages, tokens.v_pages)
    )
    tables = tokens.page_tables + 1
    tokens = tokens._replace(k_pages=k_pages, v_pages=v_pages, page_tables=tables)
    out = paged_attention.paged_attention(
        q, k, v, bounds, tokens, attend_fresh=False, max_seqlen=3
    )
    assert out.isfinite().all()
