"""Top-p and top-k over rows of logits, on CUDA devices: thresholds by search instead of a sort."""

import math

import torch

import triton
import triton.language as tl

_WAYS = 8
"""Thresholds that a pass over a row tries."""


@triton.jit
def _key(x):
    """An integer of each float32 but NaN that orders as the numbers do."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _number(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(
    logits, vocab_size, temperature, least, highest, limit, WEIGHTED: tl.constexpr, WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The least number of which all larger logits weigh at most ``limit``, and what these weigh. A logit weighs
    exp(x − highest), or one. Every pass narrows the numbers in question to an eighth."""
    low = _key(least)
    high = tl.where(limit < float("inf"), _key(highest), low)
    above = 0.0
    way = tl.arange(0, WAYS)
    while low < high:
        tried = tl.minimum(low + way * ((high - low + WAYS - 1) // WAYS), high)
        bounds = _number(tried)
        sums = tl.zeros([BLOCK, WAYS], tl.float32)
        for first in range(0, vocab_size, BLOCK):
            column = first + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < vocab_size, other=-float("inf")).to(tl.float32)
            x = tl.div_rn(x, temperature)
            weight = tl.exp(x - highest) if WEIGHTED else tl.full([BLOCK], 1.0, tl.float32)
            sums += tl.where(x[:, None] > bounds[None, :], weight[:, None], 0.0)
        total = tl.sum(sums, axis=0)
        fits = total <= limit
        above = tl.max(tl.where(fits, total, above), 0)
        low = tl.max(tl.where(fits, low, tried + 1), 0)
        high = tl.min(tl.where(fits, tried, high), 0)
    return _number(high), above


@triton.jit
def _filter_kernel(
    logits, filtered, vocab_size, row_stride, temperature, top_p, most, forbidden_token,
    LOWEST: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a row. ``most``: how many logits may be larger than the least that top-k keeps."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    filtered += row * vocab_size
    highest = -float("inf")
    least = float("inf")
    best = -float("inf")
    best_column = 0
    for first in range(0, vocab_size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < vocab_size, other=-float("inf")).to(tl.float32)
        x = tl.div_rn(x, temperature)
        highest = tl.maximum(highest, tl.max(x, 0))
        least = tl.minimum(least, tl.min(tl.where(column < vocab_size, x, float("inf")), 0))
        block_best, where = tl.max(tl.where(column == forbidden_token, -float("inf"), x), 0, return_indices=True)
        best_column = tl.where(block_best > best, first + where, best_column)
        best = tl.maximum(best, block_best)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab_size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < vocab_size, other=-float("inf")).to(tl.float32)
        sums += tl.where(column < vocab_size, tl.exp(tl.div_rn(x, temperature) - highest), 0.0)
    total = tl.sum(sums, 0)
    # NaN and infinities make the sum none; then nothing is left out, and nothing searched.
    is_number = total < float("inf")
    limit = tl.where(is_number, top_p * total, float("inf"))
    most = tl.where(is_number, most, float("inf"))
    of_p, above = _threshold(logits, vocab_size, temperature, least, highest, limit, True, WAYS, BLOCK)
    of_k, _ = _threshold(logits, vocab_size, temperature, least, highest, most, False, WAYS, BLOCK)
    threshold = tl.maximum(of_p, of_k)
    # Of those as likely as the last that top-p keeps, it keeps the first ones; top-k keeps all.
    weight = tl.exp(of_p - highest)
    counted = (limit < float("inf")) & (weight > 0) & (of_p >= of_k)
    most_equal = (limit - above) / tl.where(counted, weight, 1.0)
    num_equal = tl.where(counted, tl.minimum(most_equal, vocab_size), vocab_size).to(tl.int32)
    num_before = 0
    for first in range(0, vocab_size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < vocab_size, other=-float("inf")).to(tl.float32)
        x = tl.div_rn(x, temperature)
        equal = ((x == threshold) & (column < vocab_size)).to(tl.int32)
        # Before the first of them, nothing of this weight was taken.
        kept = (x > threshold) | ((equal > 0) & (num_before + tl.cumsum(equal, 0) - 1 <= num_equal))
        num_before += tl.sum(equal, 0)
        kept = kept | (column == best_column) | (is_number == 0)
        tl.store(filtered + column, tl.where(kept, x, LOWEST), mask=column < vocab_size)


def filtered_logits(
    logits: torch.Tensor, temperature: float, top_p: float, top_k: int, forbidden_token: int
) -> torch.Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    filtered = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    if num_rows:
        _filter_kernel[(num_rows,)](
            logits, filtered, vocab_size, logits.stride(0), float(temperature),
            float(top_p) if top_p < 1 else math.inf, float(top_k - 1) if top_k else math.inf, forbidden_token,
            LOWEST=torch.finfo(torch.float32).min,
            WAYS=_WAYS,
            BLOCK=min(1024, triton.next_power_of_2(vocab_size)),
            num_warps=16,
        )  # fmt: skip
    return filtered
