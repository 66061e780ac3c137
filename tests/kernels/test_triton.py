"""The Triton kernels against their formulas, on a GPU or interpreted, and compiled for a GPU where there is none."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from dllm_engine.check.paged_case import paged_case
from dllm_engine.kernels.features import feature_rows
from dllm_engine.kernels.noise import filtered_logits, gumbel, gumbel_max
from dllm_engine.kernels.triton import (
    eviction,
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
from dllm_engine.kernels.triton.tiles import Tiles
from tests.kernels import checks
from tests.support.kernels import DEVICE, INTERPRETED, TOLERANCE, compile_launches, runs_triton

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
each_type = pytest.mark.parametrize("dtype", [FLOAT16] if INTERPRETED else [FLOAT32, FLOAT16, BFLOAT16])
"""Interpreted, float32 is what the engines of ``test_cuda_path.py`` run."""


def in_each_type(test):
    return runs_triton(each_type(test))


compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
SHARED_MEMORY = 96 << 10
"""Bytes that every GPU since 2020 lets a program have."""

CASES = {
    # name: (rows, retained per KV head, query heads, head_dim, page_size, packed, dtype, attend_fresh, limited, splits)
    "token-major": ([32, 32], [[96, 96], [96, 96]], 2, 64, 16, False, FLOAT32, True, False, 1),
    "lengths differ": ([5, 1, 33, 20], [[n, n] for n in (7, 0, 64, 160)], 2, 32, 4, False, FLOAT32, True, False, 1),
    "split, some splits empty": ([16, 3], [[150, 150], [0, 0]], 4, 64, 16, False, FLOAT16, True, False, 4),
    "grouped queries": ([3, 9], [[33, 33], [80, 80]], 6, 128, 8, False, FLOAT16, True, False, 2),
    "ranges per head": ([8, 8], [[3, 90], [50, 0]], 4, 32, 4, True, FLOAT32, True, False, 3),
    "head_dim 96": ([12], [[40, 40]], 2, 96, 16, False, FLOAT32, True, False, 1),
    "head_dim 256": ([12], [[40, 17]], 2, 256, 16, True, FLOAT16, True, False, 2),
    "no retained tokens": ([40, 7], [[0, 0], [0, 0]], 2, 64, 16, False, FLOAT16, True, False, 1),
    "limits over fresh rows": ([24, 1], [[20, 20], [9, 9]], 4, 32, 4, False, FLOAT32, True, True, 2),
    "pages only": ([16, 16], [[100, 100], [20, 20]], 2, 64, 16, False, FLOAT32, False, False, 1),
    "pages only, ranges per head": ([10, 4], [[60, 5], [0, 33]], 4, 32, 4, True, FLOAT16, False, False, 2),
    "pages only, with limits": ([24, 18], [[40, 40], [8, 8]], 2, 32, 4, False, FLOAT32, False, True, 2),
}


def check_attention(*case, attend_fresh, limited, splits):
    def attend(case, *settings):
        out, lse, *arguments = case.arguments(*settings)
        paged_attention.paged_attention(out, lse, *arguments, splits)
        return out, lse

    checks.check_paged_attention(attend, paged_case(*case, device=DEVICE), attend_fresh, limited, rtol=1e-3)


@runs_triton
@pytest.mark.parametrize("name", CASES)
def test_attention(name):
    *case, attend_fresh, limited, splits = CASES[name]
    check_attention(*case, attend_fresh=attend_fresh, limited=limited, splits=splits)


@runs_triton
@pytest.mark.parametrize("block_q", [16, 32])
@pytest.mark.parametrize("name", ["grouped queries", "ranges per head", "limits over fresh rows"])
def test_attention_with_other_tiles(monkeypatch, name, block_q):
    monkeypatch.setattr(paged_attention, "choose_tiles", lambda *of_call: Tiles(block_q, 64, 4, 2))
    *case, attend_fresh, limited, splits = CASES[name]
    check_attention(*case, attend_fresh=attend_fresh, limited=limited, splits=splits)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_every_case_of_attention_in_every_type_and_head_dim_on_a_gpu(dim, dtype):
    for rows, retained, heads, _, page_size, packed, _, attend_fresh, limited, splits in CASES.values():
        # The cases are small for the interpreter's sake.
        case = [8 * n for n in rows], [[12 * n + n % 5 for n in lengths] for lengths in retained], heads
        for chosen in (splits, None):
            check_attention(
                *case, dim, page_size, packed, dtype, attend_fresh=attend_fresh, limited=limited, splits=chosen
            )


@in_each_type
@pytest.mark.parametrize(("rows", "kv_heads", "missing"), [(30, 1, 0.0), (30, 3, 0.4), (0, 2, 0.0)])
def test_write_slots(rows, kv_heads, missing, dtype):
    checks.check_write_slots(slots.write_slots, rows, kv_heads, 7, missing, dtype, device=DEVICE)


@in_each_type
@pytest.mark.parametrize(
    ("candidates", "heads", "dim"), [(70, (4, 2), 32), (70, (3, 3), 96), (70, (14, 2), 128), (0, (4, 2), 32)]
)
def test_mean_query_scores(candidates, heads, dim, dtype):
    checks.check_mean_query_scores(eviction.mean_query_scores, 19, candidates, heads, dim, dtype, device=DEVICE)


@in_each_type
@pytest.mark.parametrize(("num_rows", "width"), [(25, 24), (25, 150), (25, 1100), (0, 16)])
def test_features(num_rows, width, dtype):
    kernels = features.write_features, features.read_features, features.add_features
    checks.check_features(kernels, num_rows, width, 70, 0.25, dtype, device=DEVICE)


@in_each_type
@pytest.mark.parametrize(("num_rows", "num_heads", "head_dim"), [(5, 3, 64), (1, 1, 2), (9, 2, 96), (0, 4, 32)])
def test_rotary(num_rows, num_heads, head_dim, dtype):
    for rotary_dim in (head_dim, head_dim // 4 * 2 or head_dim):
        checks.check_rotate(rotary.rotate_, num_rows, num_heads, head_dim, dtype, device=DEVICE, rotary_dim=rotary_dim)


@in_each_type
@pytest.mark.parametrize(
    ("rows", "kv_heads", "dim", "missing"), [(60, 1, 24, 0.4), (60, 3, 64, 0.0), (60, 4, 96, 0.4), (0, 3, 8, 0.0)]
)
def test_similarity_sums(rows, kv_heads, dim, missing, dtype):
    case = {"rows": rows, "kv_heads": kv_heads, "dim": dim, "slots_per_page": 7, "missing": missing, "dtype": dtype}
    checks.check_similarity_sums(similarity.similarity_sums, **case, device=DEVICE)


@in_each_type
@pytest.mark.parametrize(
    ("voters", "keys", "others", "heads", "dim"),
    [
        (19, 139, 2, (3, 3), 96),
        (19, 139, 2, (14, 2), 64),
        (1, 1, 158, (4, 2), 8),
        (64, 96, 0, (4, 2), 8),
        (0, 5, 1, (3, 3), 96),
        (3, 0, 1, (14, 2), 64),
    ],
)
def test_voting_scores(voters, keys, others, heads, dim, dtype):
    kernels = voting.voting_scores, voting.summed_probabilities
    checks.check_voting(kernels, voters, keys, others, heads, dim, dtype, device=DEVICE)


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
    assert torch.equal(found, filtered_logits.kernel(logits, 1.0, 1.0, 3, -1))
    zeros = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    score, column = noise.gumbel_max(found, *zeros, 0, 1.0, -1, 2)
    expected_score, expected = gumbel_max.kernel(found, *zeros, 0, 1.0, -1)
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


@compiles
@pytest.mark.parametrize(
    ("dtype", "dim", "rows", "attend_fresh", "limited"),
    [
        (BFLOAT16, 128, 32, True, False),
        (BFLOAT16, 128, 1024, True, True),
        (BFLOAT16, 256, 32, False, True),
        (FLOAT16, 96, 1, False, False),
        (FLOAT32, 256, 32, True, False),
        (BFLOAT16, 8, 32, True, False),
    ],
)
def test_attention_compiles_for_a_gpu(monkeypatch, dtype, dim, rows, attend_fresh, limited):
    kernels = compile_launches(monkeypatch, paged_attention)
    case = paged_case([rows], [[100] * 4], heads=8, dim=dim, page_size=16, dtype=dtype)
    paged_attention.paged_attention(*case.arguments(attend_fresh, limited, True), 4)
    attention, combine = (kernel.shared_memory for kernel in kernels)
    assert len(attention) == len(combine) == 1
    assert attention[0] <= SHARED_MEMORY


@compiles
@pytest.mark.parametrize(("heads", "rows"), [(4, 32), (28, 32), (4, 1024)])
@pytest.mark.parametrize("capability", [80, 90])
def test_keys_and_values_arrive_while_the_tile_before_is_computed(monkeypatch, capability, heads, rows):
    """In both loops, over pages and over fresh rows, a tile waits for its own loads and not for those of the next."""
    kernels = compile_launches(monkeypatch, paged_attention, capability)
    case = paged_case([rows], [[100] * 4], heads=heads, dim=128, page_size=16, dtype=BFLOAT16)
    paged_attention.paged_attention(*case.arguments(True, False, False), 1)
    ((attention,), _) = (kernel.compiled for kernel in kernels)
    waits = re.findall(r"async_wait .*num = (\d+)", attention.asm["ttgir"])
    assert waits == ["2", "0", "2", "0"]  # the zeros come after the loops
    assert set(re.findall(r"cp\.async\.\w+\.shared\.global .*, (0x\w+),", attention.asm["ptx"])) == {"0x10"}


def launch(module: ModuleType, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """All kernels of a module, for 50 rows of a fused projection."""
    x = torch.zeros(50, heads + kv_heads, dim, dtype=dtype)
    places, lse = torch.zeros(50, kv_heads, dtype=torch.int64), torch.zeros(32, heads)
    pages = x.new_zeros(10, 2, 16 * kv_heads, dim)[:, 1]
    rows = feature_rows(x.new_zeros(3, 2, 16 * heads, dim), heads * dim)
    hidden, row_places = rows.new_zeros(50, heads * dim), torch.zeros(50, dtype=torch.int64)
    launches = {
        slots: [(slots.write_slots, x[:, :kv_heads], pages, places)],
        eviction: [(eviction.mean_query_scores, x[:, :heads], x[:, heads:], row_places[:18].view(3, 6), 40)],
        features: [
            *[(write, hidden, rows, row_places) for write in (features.add_features, features.write_features)],
            (features.read_features, rows, row_places),
        ],
        rotary: [(rotary.rotate_, x, torch.arange(50), torch.zeros(50, dim))],
        similarity: [(similarity.similarity_sums, x[:, heads:], pages, places)],
        voting: [
            (vote, x[:32, :heads], x[:, heads:], lse) for vote in (voting.voting_scores, voting.summed_probabilities)
        ],
    }
    for kernel, *arguments in launches[module]:
        kernel(*arguments)


@compiles
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"), [(32, 32, 128, BFLOAT16), (14, 2, 96, BFLOAT16), (28, 4, 256, FLOAT32)]
)
@pytest.mark.parametrize("module", [slots, eviction, features, rotary, similarity, voting])
def test_launches_compile_for_a_gpu(monkeypatch, module, heads, kv_heads, dim, dtype):
    kernels = compile_launches(monkeypatch, module)
    launch(module, heads, kv_heads, dim, dtype)
    for kernel in kernels:
        assert len(kernel.shared_memory) == 1
        assert kernel.shared_memory[0] <= SHARED_MEMORY


@compiles
def test_kernels_of_float32_spill_no_registers(monkeypatch):
    """On GPUs of compute capability 8.6, where four warps would, as they would in attention on most."""
    attention, _ = compile_launches(monkeypatch, paged_attention, 86)
    case = paged_case([16], [[100] * 4], heads=4, dim=128, page_size=16, dtype=FLOAT32)
    paged_attention.paged_attention(*case.arguments(True, False, False), 1)
    votes, sums = compile_launches(monkeypatch, voting, 86)
    launch(voting, 32, 32, 128, FLOAT32)
    assert attention.spilled == votes.spilled == sums.spilled == [0]


@compiles
@pytest.mark.parametrize("wanted", [(True, True), (False, False)])
def test_token_statistics_compile_for_a_gpu(monkeypatch, wanted):
    kernels = compile_launches(monkeypatch, statistics)
    statistics.token_statistics(torch.zeros(2, 126464, dtype=BFLOAT16), 126336, *wanted, 16)
    assert all(len(kernel.shared_memory) == 1 for kernel in kernels)


@compiles
def test_sampling_compiles_for_a_gpu(monkeypatch):
    kernels = [kernel for module in (noise, filters) for kernel in compile_launches(monkeypatch, module)]
    logits, counters = torch.zeros(2, 126464, dtype=BFLOAT16), torch.zeros(3, 2, dtype=torch.int64)
    noise.gumbel_max(logits, *counters, 0, 0.7, 126336, 16)
    filters.filtered_logits(logits, 0.7, 0.9, 50, 126336)
    assert all(len(kernel.shared_memory) == 1 for kernel in kernels)


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
