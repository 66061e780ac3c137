"""Tokens drawn from rows of logits, on CUDA devices. The noise never leaves the registers."""

import torch

import triton
import triton.language as tl
from dllm_engine.kernels.triton.token_statistics import splits_of


@triton.jit
def _with_counter(key, counter):
    """A key of 64 bits with one more counter hashed in; the constants are those of ``kernels/noise.py``."""
    x = key + (counter.to(tl.uint64) + 2) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel_max_kernel(
    logits, seeds, forwards, positions, scores, columns,
    vocab_size, row_stride, first_token, temperature, forbidden_token, per_split,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the best of one split of a row's vocabulary. ``scores`` and ``columns`` ``[rows, splits]``."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row_key = tl.load(seeds + row).to(tl.uint64)
    row_key = _with_counter(row_key, tl.load(forwards + row))
    row_key = _with_counter(row_key, tl.load(positions + row))
    best = tl.full([], -float("inf"), tl.float64)
    best_column = split * per_split
    stop = tl.minimum((split + 1) * per_split, vocab_size)
    for first in range(split * per_split, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_stride + column, mask=column < stop, other=-float("inf")).to(tl.float32)
        # A filter leaves most blocks nothing to draw.
        if tl.max(x, 0) > LOWEST:
            key = _with_counter(row_key, first_token + column)
            uniform = ((key >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
            # In float32 the noise would lose its tail, and a sum of 30 could be off by a millionth.
            score = tl.div_rn(x, temperature).to(tl.float64) - tl.log(-tl.log(uniform))
            score = tl.where(column == forbidden_token, -float("inf"), score)
            block_best, where = tl.max(score, 0, return_indices=True)
            best_column = tl.where(block_best > best, first + where, best_column)
            best = tl.maximum(best, block_best)
    at = row * tl.num_programs(1) + split
    tl.store(scores + at, best)
    tl.store(columns + at, best_column.to(tl.int64))


def gumbel_max(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    forwards: torch.Tensor,
    positions: torch.Tensor,
    first_token: int,
    temperature: float,
    forbidden_token: int,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``num_splits`` programs share a row (None: as many as fill the device)."""
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return torch.empty_like(seeds, dtype=torch.float64), torch.empty_like(seeds)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    block = min(1024, triton.next_power_of_2(vocab_size))
    num_splits, per_split = splits_of(logits, block, num_splits)
    scores = logits.new_empty(num_rows, num_splits, dtype=torch.float64)
    columns = torch.empty_like(scores, dtype=torch.int64)
    _gumbel_max_kernel[num_rows, num_splits](
        logits, seeds.contiguous(), forwards.contiguous(), positions.contiguous(), scores, columns,
        vocab_size, logits.stride(0), first_token, float(temperature), forbidden_token, per_split,
        LOWEST=torch.finfo(torch.float32).min,
        BLOCK=block,
    )  # fmt: skip
    if num_splits == 1:
        return scores[:, 0], columns[:, 0]
    best, winner = scores.max(dim=1)
    return best, columns.gather(1, winner[:, None])[:, 0]
