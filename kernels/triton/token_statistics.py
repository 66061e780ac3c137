"""Statistics of rows of logits, on CUDA devices."""

import torch

import triton
import triton.language as tl


@triton.jit
def _partial_statistics_kernel(
    logits,
    floats,
    tokens,
    vocab_size,
    row_stride,
    forbidden_token,
    per_split,
    WITH_ENTROPY: tl.constexpr,
    WITH_MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a row's logits of one split of the vocabulary.

    ``floats`` ``[rows, splits, 5]``: maximum, S, A, the best allowed logit, the second
    largest logit.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    highest = -float("inf")
    second = -float("inf")
    best = -float("inf")
    token = 0
    total = 0.0
    moment = 0.0
    stop = tl.minimum((split + 1) * per_split, vocab_size)
    for first in range(split * per_split, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(
            logits + row * row_stride + column, mask=column < stop, other=-float("inf")
        ).to(tl.float32)
        block_best, block_token = tl.max(
            tl.where(column == forbidden_token, -float("inf"), x),
            0,
            return_indices=True,
        )
        token = tl.where(block_best > best, first + block_token, token)
        best = tl.maximum(best, block_best)
        block_highest, where = tl.max(x, 0, return_indices=True)
        if WITH_MARGIN:
            block_second = tl.max(
                tl.where(column == first + where, -float("inf"), x), 0
            )
            second = tl.maximum(
                tl.minimum(highest, block_highest), tl.maximum(second, block_second)
            )
        new_highest = tl.maximum(
            highest, block_highest, propagate_nan=tl.PropagateNan.ALL
        )
        # A NaN or infinity makes the sums NaN.
        if new_highest != -float("inf"):
            gap = x - new_highest
            weights = tl.exp(gap)
            if WITH_ENTROPY:
                added = tl.sum(tl.where(weights > 0, weights * gap, 0.0), 0)
                moment = _moved(moment, total, highest, new_highest) + added
            total = total * tl.exp(highest - new_highest) + tl.sum(weights, 0)
            highest = new_highest
    at = row * tl.num_programs(1) + split
    tl.store(floats + at * 5, highest)
    tl.store(floats + at * 5 + 1, total)
    tl.store(floats + at * 5 + 2, moment)
    tl.store(floats + at * 5 + 3, best)
    tl.store(floats + at * 5 + 4, second)
    tl.store(tokens + at, token)


@triton.jit
def _moved(moment, total, highest, new_highest):
    """A and S of a maximum, rescaled to a higher maximum. A weight of 0 may stem from
    an infinite distance.
    """
    shift = highest - new_highest
    decay = tl.exp(shift)
    return tl.where(decay > 0, (moment + total * shift) * decay, 0.0)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_statistics_kernel(
    floats,
    tokens,
    token,
    token_logit,
    log_total,
    negative_entropy,
    top2,
    num_splits,
    WITH_ENTROPY: tl.constexpr,
    WITH_MARGIN: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program: the splits of a row."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    exists = split < num_splits
    at = row * num_splits + split
    highest = tl.load(floats + at * 5, mask=exists, other=-float("inf"))
    total = tl.load(floats + at * 5 + 1, mask=exists, other=0.0)
    best = tl.load(floats + at * 5 + 3, mask=exists, other=-float("inf"))
    split_tokens = tl.load(tokens + at, mask=exists, other=0)

    # The first of equals: splits are in the order of the vocabulary.
    row_best, winner = tl.max(best, 0, return_indices=True)
    tl.store(
        token + row, tl.sum(tl.where(split == winner, split_tokens, 0), 0).to(tl.int64)
    )
    tl.store(token_logit + row, row_best)

    row_highest, leader = tl.max(highest, 0, return_indices=True)
    row_total = tl.sum(total * tl.exp(highest - row_highest), 0)
    log_sum = tl.log(row_total)
    tl.store(log_total + row, row_highest + log_sum)
    if WITH_ENTROPY:
        moment = tl.load(floats + at * 5 + 2, mask=exists, other=0.0)
        row_moment = tl.sum(_moved(moment, total, highest, row_highest), 0)
        tl.store(negative_entropy + row, row_moment / row_total - log_sum)
    if WITH_MARGIN:
        second = tl.load(floats + at * 5 + 4, mask=exists, other=-float("inf"))
        tl.store(top2 + row * 2, row_highest)
        tl.store(
            top2 + row * 2 + 1, tl.max(tl.where(split == leader, second, highest), 0)
        )


def splits_of(logits, block):
    """Number of programs that share a row of ``logits``, as many as fill the device,
    and the columns of each: whole blocks of ``block``."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, block)
    num_programs = (
        4 * torch.cuda.get_device_properties(logits.device).multi_processor_count
    )
    num_splits = max(1, min(num_programs // num_rows, num_blocks))
    per_split = triton.cdiv(num_blocks, num_splits) * block
    return triton.cdiv(vocab_size, per_split), per_split


def token_statistics(logits, forbidden_token, *, with_entropy, with_margin):
    num_rows, vocab_size = logits.shape
    numbers = logits.new_empty(2, num_rows, dtype=torch.float32)
    entropies = logits.new_empty(num_rows * with_entropy, dtype=torch.float32)
    top2 = logits.new_empty(num_rows * with_margin, 2, dtype=torch.float32)
    results = (
        logits.new_empty(num_rows, dtype=torch.int64),
        numbers[0],
        numbers[1],
        entropies,
        top2,
    )
    if not num_rows:
        return results
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    block = min(2048, triton.next_power_of_2(vocab_size))
    num_splits, per_split = splits_of(logits, block)
    floats = logits.new_empty(num_rows, num_splits, 5, dtype=torch.float32)
    tokens = logits.new_empty(num_rows, num_splits, dtype=torch.int32)
    _partial_statistics_kernel[num_rows, num_splits](
        logits,
        floats,
        tokens,
        vocab_size,
        logits.stride(0),
        forbidden_token,
        per_split,
        WITH_ENTROPY=with_entropy,
        WITH_MARGIN=with_margin,
        BLOCK=block,
    )
    _combine_statistics_kernel[(num_rows,)](
        floats,
        tokens,
        *results,
        num_splits,
        WITH_ENTROPY=with_entropy,
        WITH_MARGIN=with_margin,
        # One size for any number of splits, so that one kernel is compiled.
        BLOCK_S=triton.next_power_of_2(triton.cdiv(vocab_size, block)),
    )
    return results
