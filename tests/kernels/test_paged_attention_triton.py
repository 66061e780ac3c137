"""The Triton kernels of paged attention, on a GPU or interpreted, and compiled for a GPU where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from dllm_engine.kernels import paged_attention
from dllm_engine.kernels.paged_attention import (
    attend_with_triton,
    paged_attention_reference,
    write_slots,
    write_slots_with_triton,
)
from tests.support.paged_cases import (
    DEVICE,
    INTERPRETED,
    TOLERANCE,
    PagedCase,
    compile_launches,
    error,
    paged_case,
    runs_triton,
)

FLOAT32, FLOAT16 = torch.float32, torch.float16
CASES = {
    # name: (rows, retained per KV head, query heads, head_dim, page_size, packed, dtype, attend_fresh, causal, splits)
    "token-major": ([32, 32], [[96, 96], [96, 96]], 2, 64, 16, False, FLOAT32, True, False, 1),
    "lengths differ": (
        [5, 1, 33, 20],
        [[7, 7], [0, 0], [64, 64], [160, 160]],
        2,
        32,
        4,
        False,
        FLOAT32,
        True,
        False,
        1,
    ),
    "split, some splits empty": ([16, 3], [[150, 150], [0, 0]], 4, 64, 16, False, FLOAT16, True, False, 4),
    "grouped queries": ([3, 9], [[33, 33], [80, 80]], 6, 128, 8, False, FLOAT16, True, False, 2),
    "ranges per head": ([8, 8], [[3, 90], [50, 0]], 4, 32, 4, True, FLOAT32, True, False, 3),
    "head_dim 96": ([12], [[40, 40]], 2, 96, 16, False, FLOAT32, True, False, 1),
    "head_dim 256": ([12], [[40, 17]], 2, 256, 16, True, FLOAT16, True, False, 2),
    "no retained tokens": ([40, 7], [[0, 0], [0, 0]], 2, 64, 16, False, FLOAT16, True, False, 1),
    "causal over fresh rows": ([40, 1], [[30, 30], [9, 9]], 4, 32, 4, False, FLOAT32, True, True, 2),
    "pages only": ([16, 16], [[100, 100], [20, 20]], 2, 64, 16, False, FLOAT32, False, False, 1),
    "pages only, ranges per head": ([10, 4], [[60, 5], [0, 33]], 4, 32, 4, True, FLOAT16, False, False, 2),
    "pages only, causal": ([40, 20], [[60, 60], [8, 8]], 2, 32, 4, False, FLOAT32, False, True, 2),
}


def check(case: PagedCase, attend_fresh: bool, causal: bool, splits: int | None) -> None:
    slots = () if attend_fresh else (case.k_slots, case.v_slots)
    expected, expected_lse = paged_attention_reference(*case.tables, *slots, attend_fresh=attend_fresh, causal=causal)
    for values, pages, to in zip((case.k, case.v), (case.k_pages, case.v_pages), slots, strict=False):
        correct = pages.cpu()
        write_slots(values.cpu(), correct, to.cpu())
        write_slots_with_triton(values, pages, to)
        torch.testing.assert_close(pages.cpu(), correct, rtol=0, atol=0, equal_nan=True)
    for return_lse in (True, False):
        out, lse = attend_with_triton(*case.tables, attend_fresh, causal, return_lse, None, None, splits)
        assert out.dtype == case.q.dtype
        assert not out.isnan().any()
        assert error(out, expected) < TOLERANCE[case.q.dtype]
        if return_lse:
            torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-3)


@runs_triton
@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula_and_reads_only_what_is_retained(name):
    rows, retained, heads, dim, page_size, packed, dtype, attend_fresh, causal, splits = CASES[name]
    check(paged_case(rows, retained, heads, dim, page_size, packed, dtype, device=DEVICE), attend_fresh, causal, splits)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_every_case_in_every_type_and_head_dim_on_a_gpu(dim, dtype):
    for rows, retained, heads, _, page_size, packed, _, attend_fresh, causal, splits in CASES.values():
        # The cases are small for the interpreter's sake.
        rows, retained = [8 * n for n in rows], [[12 * n + n % 5 for n in lengths] for lengths in retained]
        for chosen in (splits, None):
            case = paged_case(rows, retained, heads, dim, page_size, packed, dtype, device=DEVICE)
            check(case, attend_fresh, causal, chosen)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize(
    ("dtype", "dim", "rows", "semantics"),
    [
        (torch.bfloat16, 128, 32, (True, False)),
        (torch.bfloat16, 128, 1024, (True, True)),
        (torch.bfloat16, 256, 32, (False, True)),
        (torch.float16, 96, 1, (False, False)),
        (torch.float32, 256, 32, (True, False)),
    ],
)
def test_launches_compile_for_a_gpu(monkeypatch, dtype, dim, rows, semantics):
    kernels = compile_launches(monkeypatch, paged_attention)
    case = paged_case([rows], [[100] * 4], heads=8, dim=dim, page_size=16, dtype=dtype)
    attend_with_triton(*case.tables, *semantics, True, None, None, 4)
    write_slots_with_triton(case.k, case.k_pages, case.k_slots)
    attention, combine, write = (kernel.shared_memory for kernel in kernels)
    assert len(attention) == len(combine) == len(write) == 1
    assert attention[0] <= 96 << 10  # what every GPU since 2020 lets a program have


@pytest.mark.skipif(INTERPRETED, reason="this starts the interpreter")
def test_kernels_in_the_interpreter():
    """All Triton tests of this folder, in one process of its own: Triton reads the variable when it is imported."""
    folder = Path(__file__).parent
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore",
         *map(str, sorted(folder.glob("test_*_triton.py")))],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
