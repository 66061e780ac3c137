"""Tokens drawn from rows of logits, and top-p and top-k before that, on CUDA devices.

The noise never leaves the registers. Filters find a threshold by search instead of a
sort. Each program has a block of a row, and the programs of the next launch add up the
sums of all blocks. The order of additions and the tokens that are kept do not depend on
the number of rows.
"""

import math

import torch

import triton
import triton.language as tl
from dllm_engine.kernels.triton.token_statistics import splits_of

_BLOCK, _STEP = 4096, 512
"""Logits of a program, and the number of them that the search adds up at once, in
registers.
"""
_BITS = 4
"""Bits of a threshold that a launch of the search finds: it tries 16 thresholds."""
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Number of the last bits of a float32 that are zero if the type can hold it."""
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Value of the logits that a filter leaves out."""


@triton.jit
def _with_counter(key, counter):
    """A key of 64 bits with one more counter hashed in; the constants are those of
    ``kernels/sampling.py``.
    """
    x = key + (counter.to(tl.uint64) + 2) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel_max_kernel(
    logits,
    seeds,
    forwards,
    positions,
    scores,
    columns,
    vocab_size,
    row_stride,
    first_token,
    temperature,
    forbidden_token,
    per_split,
    BLOCK: tl.constexpr,
):
    """One program: the best of one split of a row's vocabulary. ``scores`` and
    ``columns`` ``[rows, splits]``.
    """
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
        x = tl.load(
            logits + row * row_stride + column, mask=column < stop, other=-float("inf")
        ).to(tl.float32)
        # With a filter, most blocks have no token to draw.
        if tl.max(x, 0) > _LOWEST:
            key = _with_counter(row_key, first_token + column)
            uniform = ((key >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
            # In float32 the noise would lose its tail, and a sum of 30 could be off by
            # a millionth.
            score = tl.div_rn(x, temperature).to(tl.float64) - tl.log(-tl.log(uniform))
            score = tl.where(column == forbidden_token, -float("inf"), score)
            block_best, where = tl.max(score, 0, return_indices=True)
            best_column = tl.where(block_best > best, first + where, best_column)
            best = tl.maximum(best, block_best)
    at = row * tl.num_programs(1) + split
    tl.store(scores + at, best)
    tl.store(columns + at, best_column.to(tl.int64))


def gumbel_max(logits, counters, first_token, temperature, forbidden_token):
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return torch.empty_like(counters.seeds, dtype=torch.float64), torch.empty_like(
            counters.seeds
        )
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    block = min(1024, triton.next_power_of_2(vocab_size))
    num_splits, per_split = splits_of(logits, block)
    scores = logits.new_empty(num_rows, num_splits, dtype=torch.float64)
    columns = torch.empty_like(scores, dtype=torch.int64)
    _gumbel_max_kernel[num_rows, num_splits](
        logits,
        *(counter.contiguous() for counter in counters),
        scores,
        columns,
        vocab_size,
        logits.stride(0),
        first_token,
        float(temperature),
        forbidden_token,
        per_split,
        BLOCK=block,
    )
    if num_splits == 1:
        return scores[:, 0], columns[:, 0]
    best, winner = scores.max(dim=1)
    return best, columns.gather(1, winner[:, None])[:, 0]


@triton.jit
def _divide_kernel(
    logits,
    filtered,
    floats,
    vocab_size,
    row_stride,
    temperature,
    forbidden_token,
    BLOCK: tl.constexpr,
):
    """Logits at the temperature, and ``floats`` ``[rows, blocks, 4]``: the largest
    logit, the sum of exponentials, the best allowed logit and its column."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        logits + row * row_stride + column,
        mask=column < vocab_size,
        other=-float("inf"),
    ).to(tl.float32)
    x = tl.div_rn(x, temperature)
    tl.store(filtered + row * vocab_size + column, x, mask=column < vocab_size)
    # A block of only −∞ has no weight.
    highest = tl.maximum(tl.max(x, 0), _LOWEST)
    allowed = (column != forbidden_token) & (x == x)
    best, where = tl.max(tl.where(allowed, x, -float("inf")), 0, return_indices=True)
    floats += (row * tl.num_programs(1) + tl.program_id(1)) * 4
    tl.store(floats, highest)
    tl.store(floats + 1, tl.sum(tl.exp(x - highest), 0))
    tl.store(floats + 2, best)
    tl.store(floats + 3, (tl.program_id(1) * BLOCK + where).to(tl.float32))


@triton.jit
def _number(key, UNUSED_BITS: tl.constexpr):
    """The number of a key. Keys are unsigned integers of 32 bits in the order of the
    numbers. A key between two numbers of the logits' type stands for the lower number,
    and a key beyond an infinity for the infinity."""
    bits = tl.where(key < 0, key ^ -0x80000000, ~key) & (-1 << UNUSED_BITS)
    return (tl.minimum(bits & 0x7FFFFFFF, 0x7F800000) | (bits & -0x80000000)).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _searched(
    floats,
    keys,
    sums,
    top_p,
    most,
    number,
    WITH_K: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """State of a row's search after ``number`` launches: the column of the best allowed
    logit, the highest logit, the weight that logits above the threshold may have, the
    highest possible key of the threshold, and the weight of the logits above that key.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    exists = block < tl.num_programs(1)
    floats += (row * tl.num_programs(1) + block) * 4
    maxima = tl.load(floats, mask=exists, other=-float("inf"))
    highest = tl.max(maxima, 0)
    _, best = tl.max(
        tl.load(floats + 2, mask=exists, other=-float("inf")), 0, return_indices=True
    )
    best_column = tl.sum(
        tl.where(block == best, tl.load(floats + 3, mask=exists, other=0.0), 0.0), 0
    )
    total = tl.sum(
        tl.load(floats + 1, mask=exists, other=0.0) * tl.exp(maxima - highest), 0
    )
    # With NaN or infinities the sum is not finite, and nothing is left out.
    limit = tl.where(total < float("inf"), top_p * total, float("inf"))
    most = tl.where(total < float("inf"), most, float("inf"))
    key = -1
    above = 0.0
    if number > 0:
        row += (number - 1) * tl.num_programs(0).to(tl.int64)
        way = tl.arange(0, 1 << BITS)
        at = (
            sums
            + ((row * tl.num_programs(1) + block[None, :]) * 2 << BITS)
            + way[:, None]
        )
        weights = tl.sum(tl.load(at, mask=exists[None, :], other=0.0), 1)
        exceeds = weights > limit
        if WITH_K:
            exceeds |= (
                tl.sum(tl.load(at + (1 << BITS), mask=exists[None, :], other=0.0), 1)
                > most
            )
        last = (1 << BITS) - 1 - tl.sum(exceeds.to(tl.int32), 0)
        key = tl.load(keys + row) - (last << 32 - BITS * number)
        above = tl.sum(tl.where(way == last, weights, 0.0), 0)
    return best_column, highest, limit, key, above


@triton.jit(do_not_specialize=["number"])
def _search_kernel(
    filtered,
    floats,
    keys,
    sums,
    vocab_size,
    temperature,
    top_p,
    most,
    number,
    WITH_K: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Try thresholds, the highest first. ``keys`` ``[launches, rows]``: key of the
    first threshold. ``sums`` ``[launches, rows, blocks, 2, thresholds]``: the weight of
    the logits above each threshold, exp(x − highest), and their number."""
    _, highest, _, key, _ = _searched(
        floats, keys, sums, top_p, most, number, WITH_K, BITS, BLOCKS
    )
    way = tl.arange(0, 1 << BITS)
    tried = tl.div_rn(
        _number(key - (way << 32 - BITS - BITS * number), UNUSED_BITS), temperature
    )
    row = tl.program_id(0).to(tl.int64)
    weights = tl.zeros([1 << BITS, STEP], tl.float32)
    counts = tl.zeros([1 << BITS, STEP], tl.float32)
    for first in tl.range(0, BLOCK, STEP, num_stages=3):
        column = tl.program_id(1) * BLOCK + first + tl.arange(0, STEP)
        x = tl.load(
            filtered + row * vocab_size + column,
            mask=column < vocab_size,
            other=-float("inf"),
        )
        is_above = x[None, :] > tried[:, None]
        # An addition under a predicate: adding zeros would take one more instruction.
        weights = tl.where(is_above, weights + tl.exp(x - highest)[None, :], weights)
        if WITH_K:
            counts = tl.where(is_above, counts + 1, counts)
    row += number * tl.num_programs(0).to(tl.int64)
    tl.store(keys + row, key)
    sums += ((row * tl.num_programs(1) + tl.program_id(1)) * 2 << BITS) + way
    tl.store(sums, tl.sum(weights, 1))
    if WITH_K:
        tl.store(sums + (1 << BITS), tl.sum(counts, 1))


@triton.jit(do_not_specialize=["number"])
def _filter_kernel(
    filtered,
    floats,
    keys,
    sums,
    equals,
    vocab_size,
    temperature,
    top_p,
    most,
    number,
    WITH_K: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Count the logits that equal the threshold, ``equals`` ``[rows, blocks]``, or
    overwrite the logits that are left out.
    """
    best_column, highest, limit, key, above = _searched(
        floats, keys, sums, top_p, most, number, WITH_K, BITS, BLOCKS
    )
    threshold = tl.div_rn(_number(key, UNUSED_BITS), temperature)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    filtered += row * vocab_size + column
    x = tl.load(filtered, mask=column < vocab_size, other=-float("inf"))
    equal = (x == threshold).to(tl.int32)
    equals += row * tl.num_programs(1)
    if COUNT:
        tl.store(equals + tl.program_id(1), tl.sum(equal, 0))
    else:
        block = tl.arange(0, BLOCKS)
        # Among tokens as likely as the last one it keeps, top-p keeps the first ones,
        # and top-k keeps all.
        before = (
            tl.sum(tl.load(equals + block, mask=block < tl.program_id(1), other=0), 0)
            + tl.cumsum(equal, 0)
            - 1
        )
        exceeds = above + before * tl.exp(threshold - highest) > limit
        left_out = ((x < threshold) | ((equal > 0) & exceeds)) & (column != best_column)
        tl.store(filtered, _LOWEST, mask=left_out & (column < vocab_size))


def filtered_logits(logits, temperature, top_p, top_k, forbidden_token):
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    filtered = torch.empty(
        num_rows, vocab_size, dtype=torch.float32, device=logits.device
    )
    if not num_rows:
        return filtered
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    grid = num_rows, triton.cdiv(vocab_size, block)
    floats = filtered.new_empty(*grid, 4)
    _divide_kernel[grid](
        logits,
        filtered,
        floats,
        vocab_size,
        logits.stride(0),
        float(temperature),
        forbidden_token,
        BLOCK=block,
        num_warps=8,
    )
    if top_p >= 1 and not top_k:
        return filtered
    num_launches = triton.cdiv(32 - _UNUSED_BITS[logits.dtype], _BITS)
    keys = filtered.new_empty(num_launches, num_rows, dtype=torch.int32)
    sums = filtered.new_empty(num_launches, *grid, 2, 1 << _BITS)
    equals = filtered.new_empty(grid, dtype=torch.int32)
    limits = (
        float(top_p) if top_p < 1 else math.inf,
        float(top_k - 1) if top_k else math.inf,
    )
    settings = vocab_size, float(temperature), *limits
    blocks = triton.next_power_of_2(grid[1])
    constants = {
        "UNUSED_BITS": _UNUSED_BITS[logits.dtype],
        "BITS": _BITS,
        "BLOCKS": blocks,
        "BLOCK": block,
    }
    for number in range(num_launches):
        _search_kernel[grid](
            filtered,
            floats,
            keys,
            sums,
            *settings,
            number,
            WITH_K=top_k > 0,
            STEP=min(_STEP, block),
            num_warps=8 if top_k else 4,
            **constants,
        )
    for count in (True, False):
        _filter_kernel[grid](
            filtered,
            floats,
            keys,
            sums,
            equals,
            *settings,
            num_launches,
            WITH_K=top_k > 0,
            COUNT=count,
            num_warps=8,
            **constants,
        )
    return filtered
