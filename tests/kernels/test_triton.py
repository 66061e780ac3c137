"""The Triton kernels against their formulas, on a GPU or interpreted, and compiled for
a GPU where there is none.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from dllm_engine.check import cases
from dllm_engine.check.cases import Draw, Sizes
from dllm_engine.check.checks import compare
from dllm_engine.kernels.paged_attention import _paged_attention
from dllm_engine.kernels.sampling import Counters
from dllm_engine.kernels.triton import paged_attention, sampling
from dllm_engine.kernels.triton import token_statistics as statistics
from tests.kernels import checks
from tests.kernels.checks import (
    DEVICE,
    INTERPRETED,
    TOLERANCE,
    all_operators,
    compile_launches,
    error,
    runs_triton,
)
from tests.support.checkout import CHECKOUT

KERNEL_CASES = cases.BY_HEADS | cases.OTHERS
SHARED_MEMORY = {90: 227 << 10, 86: 99 << 10}
"""Bytes that a program may have, by compute capability: much on a Hopper, little on
what games are played with.
"""


@runs_triton
def test_programs_that_share_keys_leave_their_counters_at_zero(monkeypatch):
    """So that the next launch, or the next replay of a recorded one, counts from zero
    and computes the same bits. The second request retains nothing."""
    case, wide = (
        cases.paged_case(
            Draw(Sizes(2, 2, 32, 0, 0, 16), torch.float16, stored, device),
            rows=[20, 3],
            retained=[[300, 300], [0, 0]],
        )
        for stored, device in ((torch.float16, DEVICE), (torch.float32, "cpu"))
    )

    def attend(kernel, case):
        lse = case[0].new_empty(case[0].shape[:2], dtype=torch.float32)
        return kernel(*case, None, lse, True, 20), lse

    expected, expected_lse = attend(_paged_attention.cpu, wide)
    results = []
    for num_splits in (3, 3, 1):
        monkeypatch.setattr(
            paged_attention, "choose_splits", lambda *_, count=num_splits: count
        )
        results.append(attend(paged_attention.paged_attention, case))
        assert not paged_attention._counters(torch.device(DEVICE)).any()
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    for out, lse in results[1:]:
        assert error(out.cpu(), expected.double()) < TOLERANCE[out.dtype]
        torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-3, atol=1e-3)


def set_multiprocessors(monkeypatch, count):
    gpu = SimpleNamespace(multi_processor_count=count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)


@pytest.fixture
def on_triton(monkeypatch):
    """Operators take the way of a GPU. Cases are small, and steps of loops large, for
    the interpreter's sake.
    """
    monkeypatch.setattr(cases, "PAGED", (([3, 1], [40, 17]), ([20], [70])))
    if INTERPRETED:
        monkeypatch.setattr(cases, "ROWS", 60)
        monkeypatch.setattr(sampling, "_STEP", 2048)

    def replace_operators() -> None:
        set_multiprocessors(monkeypatch, 30)
        for operator in all_operators().values():
            monkeypatch.setattr(operator, "cpu", operator.triton)

    return replace_operators


@runs_triton
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        (Sizes(4, 2, 32, 64, 150, 8), torch.float32),
        (Sizes(7, 1, 96, 1100, 3000, 4), torch.float16),
        *([] if INTERPRETED else [(Sizes(4, 2, 32, 64, 150, 8), torch.bfloat16)]),
    ],
)
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_cases_of_dllm_check(on_triton, name, sizes, dtype):
    expected = KERNEL_CASES[name](Draw(sizes, dtype, torch.float32, "cpu"))
    if INTERPRETED:
        on_triton()
    error, bound = compare(
        KERNEL_CASES[name](Draw(sizes, dtype, dtype, DEVICE)), expected
    )
    assert error <= bound


@runs_triton
@pytest.mark.parametrize("number", range(1, len(checks.FILTERS)))
def test_filtered_logits(monkeypatch, number):
    """Rows of two blocks, the first of two steps."""
    monkeypatch.setattr(sampling, "_BLOCK", 512)
    monkeypatch.setattr(sampling, "_STEP", 256)
    dtype = (torch.float32, torch.float16)[number % 2]
    top_p, top_k = checks.FILTERS[number]
    checks.check_filtered_logits(
        sampling.filtered_logits, 700, top_p, top_k, dtype, device=DEVICE
    )


@runs_triton
@pytest.mark.parametrize("multiprocessors", [1, 30])
def test_rows_that_are_no_numbers_stay_so(monkeypatch, multiprocessors):
    """Also where all of a block or of a split is NaN, which a maximum would pass over.
    Their probability is no number, which ends the request; the token drawn is one of
    the vocabulary."""
    set_multiprocessors(monkeypatch, multiprocessors)
    monkeypatch.setattr(sampling, "_BLOCK", 1024)
    monkeypatch.setattr(sampling, "_STEP", 512)
    logits = torch.randn(6, 1600, device=DEVICE)
    logits[0, 17] = torch.nan
    logits[1, 1599] = torch.inf
    logits[2, :1024] = torch.nan
    logits[3, 1024:] = torch.nan
    logits[4, :1200] = -torch.inf
    _, token_logit, log_total, *_ = statistics.token_statistics(
        logits, 7, with_entropy=False, with_margin=False
    )
    probability = (token_logit - log_total).exp()
    assert (probability < torch.inf).nonzero()[:, 0].tolist() == [4, 5]
    counters = Counters(*torch.zeros(3, 6, dtype=torch.int64, device=DEVICE))
    found = sampling.filtered_logits(logits, 0.7, 0.9, 5, -1)
    torch.testing.assert_close(found[:4], logits[:4] / 0.7, **checks.EXACT)
    _, column = sampling.gumbel_max(logits, counters, 0, 1.0, -1)
    assert ((column >= 0) & (column < 1600)).all()


@runs_triton
@pytest.mark.parametrize(
    "name", [name for name in KERNEL_CASES if name.startswith(("write_", "rotate_"))]
)
def test_nothing_is_launched_for_no_rows(on_triton, monkeypatch, name):
    if INTERPRETED:
        on_triton()
    monkeypatch.setattr(cases, "ROWS", 0)
    KERNEL_CASES[name](
        Draw(Sizes(4, 2, 32, 64, 150, 8), torch.float16, torch.float16, DEVICE)
    )


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize(
    ("name", "capability"),
    [*((name, 90) for name in KERNEL_CASES), ("paged_attention, token-major", 86)],
)
def test_launches_compile_for_a_gpu(monkeypatch, on_triton, name, capability):
    """At the sizes of LLaDA-8B."""
    on_triton()
    kernels = compile_launches(monkeypatch, capability)
    # The larger tile needs more memory.
    paged = (([32], [600]), ([300], [40]))
    monkeypatch.setattr(cases, "PAGED", paged if capability == 90 else paged[1:])
    KERNEL_CASES[name](
        Draw(Sizes(32, 32, 128, 4096, 126_464), torch.bfloat16, torch.bfloat16, "cpu")
    )
    shared_memory = [size for kernel in kernels for size in kernel.shared_memory]
    assert shared_memory
    assert max(shared_memory) <= SHARED_MEMORY[capability]


@pytest.mark.skipif(INTERPRETED, reason="this starts the interpreter")
def test_kernels_in_the_interpreter():
    """The tests of this file in a process of its own: Triton reads the variable when it
    is imported.
    """
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--noconftest",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            __file__,
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
