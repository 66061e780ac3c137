"""The Triton kernels against their formulas, on a GPU or interpreted, and compiled for a GPU where there is none."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from dllm_engine.check import cases
from dllm_engine.check.cases import Draw, Sizes
from dllm_engine.check.checks import compare
from dllm_engine.kernels.noise import filtered_logits, gumbel, gumbel_max
from dllm_engine.kernels.triton import (
    features,
    filters,
    noise,
    paged_attention,
    rotary,
    similarity,
    slots,
    voting,
)
from dllm_engine.kernels.triton import token_statistics as statistics
from dllm_engine.kernels.triton.tiles import splits_by_rule
from tests.kernels import checks
from tests.support.kernels import DEVICE, INTERPRETED, all_operators, compile_launches, runs_triton

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
each_type = pytest.mark.parametrize("dtype", [FLOAT16] if INTERPRETED else [FLOAT32, FLOAT16, BFLOAT16])


def in_each_type(test):
    return runs_triton(each_type(test))


KERNEL_CASES = cases.BY_HEADS | cases.OTHERS
CASES = {
    # name: (rows, retained per KV head, query heads, head_dim, page_size, packed, dtype, attend_fresh, limited, splits)
    "token-major": ([32, 32], [[96, 96], [96, 96]], 2, 64, 16, False, FLOAT32, True, False, 1),
    "lengths differ": ([5, 1, 33, 20], [[n, n] for n in (7, 0, 64, 160)], 2, 32, 4, False, FLOAT32, True, False, 1),
    "one request split": ([16, 3], [[600, 600], [0, 0]], 4, 64, 16, False, FLOAT16, True, False, 4),
    "grouped queries": ([3, 9], [[33, 33], [300, 300]], 6, 128, 8, False, FLOAT16, True, False, 3),
    "ranges per head": ([8, 8], [[3, 390], [150, 0]], 4, 32, 4, True, FLOAT32, True, False, 3),
    "head_dim 96": ([12], [[40, 40]], 2, 96, 16, False, FLOAT32, True, False, 1),
    "head_dim 256": ([12], [[40, 17]], 2, 256, 16, True, FLOAT16, True, False, 2),
    "no retained tokens": ([40, 7], [[0, 0], [0, 0]], 2, 64, 16, False, FLOAT16, True, False, 1),
    "limits over fresh rows": ([24, 1], [[130, 130], [9, 9]], 4, 32, 4, False, FLOAT32, True, True, 2),
    "pages only": ([16, 16], [[100, 100], [20, 20]], 2, 64, 16, False, FLOAT32, False, False, 1),
    "pages only, ranges per head": ([10, 4], [[60, 5], [0, 33]], 4, 32, 4, True, FLOAT16, False, False, 2),
    "pages only, with limits": ([24, 18], [[260, 260], [8, 8]], 2, 32, 4, False, FLOAT32, False, True, 2),
}


def check_attention(*case, attend_fresh, limited, splits):
    def attend(case, *settings):
        out, lse, *arguments = case.arguments(*settings)
        paged_attention.paged_attention(out, lse, *arguments, splits)
        return out, lse

    checks.check_paged_attention(attend, checks.paged_case(*case, device=DEVICE), attend_fresh, limited, rtol=1e-3)


@runs_triton
@pytest.mark.parametrize("name", CASES)
def test_attention(name):
    *case, attend_fresh, limited, splits = CASES[name]
    check_attention(*case, attend_fresh=attend_fresh, limited=limited, splits=splits)


@runs_triton
def test_programs_that_share_keys_leave_their_counters_at_zero():
    """So that the next launch, or the next replay of a recorded one, counts from zero and computes the same bits."""
    case = checks.paged_case([20, 3], [[300, 300], [0, 0]], 2, 32, 16, dtype=FLOAT16, device=DEVICE)
    results = []
    for num_splits in (3, 3, 1):
        out, lse, *arguments = case.arguments(True, False, True)
        paged_attention.paged_attention(out, lse, *arguments, num_splits)
        results.append((out, lse))
        assert not paged_attention._counters(out.device).any()
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[2][1], results[0][1])


@pytest.mark.parametrize(
    ("requests", "kv_heads", "num_keys", "splits"),
    [(1, 32, 608, 4), (1, 32, 1056, 8), (1, 32, 9000, 8), (1, 4, 4096, 32), (4, 32, 1056, 2), (64, 32, 1056, 1)],
)
def test_programs_share_keys_until_two_are_on_each_multiprocessor(requests, kv_heads, num_keys, splits):
    assert splits_by_rule(requests * kv_heads, num_keys, num_multiprocessors=132) == splits


@pytest.fixture
def on_triton(monkeypatch):
    """Operators take the way of a GPU; ``PAGED`` is small for the interpreter's sake."""
    monkeypatch.setattr(cases, "PAGED", (([3, 1], [40, 17]), ([20], [70])))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=3))
    return lambda: [monkeypatch.setattr(operator, "cpu", operator.triton) for operator in all_operators().values()]


@in_each_type
@pytest.mark.parametrize("sizes", [Sizes(4, 2, 32, 64, 150, 8), Sizes(7, 1, 96, 1100, 3000, 4)], ids=["even", "odd"])
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_cases_of_dllm_check(on_triton, name, sizes, dtype):
    expected = KERNEL_CASES[name](Draw(sizes, dtype, torch.float32, "cpu"))
    if INTERPRETED:
        on_triton()
    error, bound = compare(KERNEL_CASES[name](Draw(sizes, dtype, dtype, DEVICE)), expected)
    assert error <= bound


@runs_triton
def test_nothing_is_launched_for_no_rows():
    kernels = features.write_features, features.read_features, features.add_features
    votes = voting.voting_scores, voting.summed_probabilities
    similarities = {"rows": 0, "kv_heads": 3, "dim": 8, "slots_per_page": 7, "missing": 0.0, "device": DEVICE}
    checks.check_write_slots((slots.write_slots, slots.write_kv), 0, 2, 7, 0.0, FLOAT16, device=DEVICE)
    checks.check_features(kernels, 0, 16, 70, 0.25, FLOAT16, device=DEVICE)
    checks.check_rotate(rotary.rotate_, 0, 4, 32, FLOAT16, device=DEVICE)
    checks.check_similarity_sums(similarity.similarity_sums, **similarities)
    checks.check_voting(votes, 0, 5, 1, (3, 3), 96, FLOAT16, device=DEVICE)
    checks.check_voting(votes, 3, 0, 1, (14, 2), 64, FLOAT16, device=DEVICE)


@in_each_type
@pytest.mark.parametrize(("vocab_size", "splits"), [(5, 3), (150, 1), (5000, 1), (5000, 3)])
def test_token_statistics(vocab_size, splits, dtype):
    def kernel(*arguments):
        return statistics.token_statistics(*arguments, splits)

    logits = torch.randn(6, vocab_size + 2, device=DEVICE).to(dtype)[:, :vocab_size] * 8
    logits[1] = logits[1].round()  # many ties
    logits[2] = 0
    logits[3, : vocab_size // 2] = torch.finfo(dtype).min
    logits[4, vocab_size // 2 :] = -torch.inf
    for forbidden in (-1, int(logits[0].argmax()), vocab_size - 1):
        checks.check_token_statistics(kernel, logits, forbidden)


@runs_triton
@pytest.mark.parametrize("splits", [1, 3])
def test_logits_that_are_not_finite_make_no_probability(splits):
    """Also where all of a block or of a split is NaN, which a maximum would pass over."""
    logits = torch.randn(6, 5000, device=DEVICE)
    logits[0, 17] = torch.nan
    logits[1, 4999] = torch.inf
    logits[2, :2048] = torch.nan
    logits[3, 2048:] = torch.nan
    logits[4, :4000] = -torch.inf
    _, token_logit, log_total, *_ = statistics.token_statistics(logits, 7, False, False, splits)
    probability = (token_logit - log_total).exp()
    assert (probability < torch.inf).tolist() == [False, False, False, False, True, True]


@in_each_type
@pytest.mark.parametrize(
    ("vocab_size", "first_token", "splits"), [(5, 0, 3), (150, 126_000, 1), (3500, 63_232, 1), (3500, 63_232, 3)]
)
def test_gumbel_max(vocab_size, first_token, splits, dtype):
    def kernel(*arguments):
        return noise.gumbel_max(*arguments, splits)

    for seed, temperature in enumerate((0.2, 1.0, 1.7)):
        checks.check_gumbel_max(kernel, vocab_size, first_token, temperature, dtype, seed, DEVICE)


@runs_triton
@pytest.mark.parametrize("number", range(1, len(checks.FILTERS)))
def test_filtered_logits(number):
    (top_p, top_k), dtype = checks.FILTERS[number], (FLOAT32, FLOAT16)[number % 2]
    checks.check_filtered_logits(filters.filtered_logits, 1500, top_p, top_k, dtype, device=DEVICE)


@runs_triton
def test_many_tokens_and_few_of_them_pass():
    logits = torch.randn(2, 5000, device=DEVICE)
    logits[0, 4500] = 9.0
    found = filters.filtered_logits(logits, 1.0, 1.0, 3, -1)
    assert torch.equal(found, filtered_logits.cpu(logits, 1.0, 1.0, 3, -1))
    zeros = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    score, column = noise.gumbel_max(found, *zeros, 0, 1.0, -1, 2)
    expected_score, expected = gumbel_max.cpu(found, *zeros, 0, 1.0, -1)
    assert torch.equal(column, expected)
    torch.testing.assert_close(score, expected_score, rtol=1e-14, atol=0)


@runs_triton
def test_rows_that_are_no_numbers_stay_so():
    """Their probability, which is no number, ends the request."""
    logits = torch.zeros(4, 3000, device=DEVICE)
    logits[0, 2500], logits[1, 7], logits[2], logits[3] = torch.nan, torch.inf, torch.nan, -torch.inf
    found = filters.filtered_logits(logits, 0.7, 0.9, 5, -1)
    torch.testing.assert_close(found, logits / 0.7, **checks.EXACT)


@runs_triton
def test_noise_of_a_kernel_is_that_of_a_cpu_to_the_last_bit_of_its_logarithms():
    """Each column alone is its row's best, so that the score is its noise."""
    num_rows = 20 if INTERPRETED else 300  # interpreted one after the other
    positions = torch.arange(num_rows, device=DEVICE)
    counters = torch.full_like(positions, -(2**63)), torch.zeros_like(positions), positions
    for token in (0, 1, 126_463, 2**31 - 2):
        score, _ = noise.gumbel_max(torch.zeros(num_rows, 1, device=DEVICE), *counters, token, 1.0, -1, 1)
        torch.testing.assert_close(score, gumbel(*counters, torch.tensor(token, device=DEVICE)), rtol=1e-14, atol=0)


@runs_triton
def test_nothing_is_drawn_from_logits_that_are_no_numbers():
    """Also then the token is one of the vocabulary: its probability, which is no number, ends the request."""
    counters = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    logits = torch.full((2, 3000), torch.nan, device=DEVICE)
    logits[1] = -torch.inf
    _, column = noise.gumbel_max(logits, *counters, 0, 1.0, -1, 2)
    assert ((column >= 0) & (column < 3000)).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [1, 32, 1000])
def test_splits_of_a_vocabulary_are_chosen_for_a_gpu(num_rows):
    logits = torch.randn(num_rows, 126464, device=DEVICE).bfloat16()
    checks.check_token_statistics(statistics.token_statistics, logits, 126336, atol=2e-5)


SHARED_MEMORY = {90: 227 << 10, 86: 99 << 10}
"""Bytes that a program may have, by compute capability: much on a Hopper, little on what games are played with."""


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize(
    ("name", "capability"), [*((name, 90) for name in KERNEL_CASES), ("paged_attention, token-major", 86)]
)
def test_launches_compile_for_a_gpu(monkeypatch, on_triton, name, capability):
    """At the sizes of LLaDA-8B."""
    on_triton()
    kernels = compile_launches(monkeypatch, capability)
    monkeypatch.setattr(cases, "PAGED", (([32], [600]), ([300], [40])))
    KERNEL_CASES[name](Draw(Sizes(32, 32, 128, 4096, 126_464), BFLOAT16, BFLOAT16, "cpu"))
    shared_memory = [size for kernel in kernels for size in kernel.shared_memory]
    assert shared_memory
    assert max(shared_memory) <= SHARED_MEMORY[capability]


@pytest.mark.skipif(INTERPRETED, reason="this starts the interpreter")
def test_kernels_in_the_interpreter():
    """The tests of this file in a process of its own: Triton reads the variable when it is imported."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
