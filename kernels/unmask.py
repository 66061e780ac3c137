r"""What unmasking needs to know of each row of logits, in one pass over the vocabulary.

For logits l_1 … l_V of a row, and p = softmax(l):

    token            = argmax_j l_j, j other than a forbidden token; the lowest j on a tie
    log_total        = log Σ_j exp(l_j);  the token's probability is exp(token_logit − log_total)
    top2             = the two largest l_j;  the margin is the difference of their probabilities
    negative_entropy = Σ_j p_j log(p_j + ε),  ε = 1e-10

Only the token leaves the forbidden one out. One pass keeps, with the running maximum m, the sums S = Σ exp(l_j − m) and
A = Σ exp(l_j − m)(l_j − m), both rescaled when m grows; then log_total = m + log S and Σ p_j log p_j = A/S − log S.
That leaves out ε, which adds Σ p_j log(1 + ε/p_j): between 0 and V·ε, about 1e-5. The CPU takes a second pass and
keeps it.

Shards i of a vocabulary combine from these numbers alone: log_total = log Σ_i exp(log_total_i) and, with
w_i = exp(log_total_i − log_total), negative_entropy = Σ_i w_i (negative_entropy_i + log w_i).
"""

import numpy as np
import torch

from dllm_engine.kernels._operator import operator
from dllm_engine.kernels._triton import jit, tl, triton

# The arguments of Triton kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

_ENTROPY_EPS = 1e-10
_LOGITS_PER_CHUNK = 1 << 17
"""Logits the CPU goes over at once: with their exponentials 1 MiB, which stays in a core's cache between the passes."""


@jit
def _partial_statistics_kernel(
    logits, floats, tokens, vocab_size, row_stride, forbidden_token, per_split,
    WITH_ENTROPY: tl.constexpr,
    WITH_MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a row's logits of one split of the vocabulary.

    ``floats`` ``[rows, splits, 5]``: maximum, S, A, the best allowed logit, the second largest logit.
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
        x = tl.load(logits + row * row_stride + column, mask=column < stop, other=-float("inf")).to(tl.float32)
        block_best, block_token = tl.max(tl.where(column == forbidden_token, -float("inf"), x), 0, return_indices=True)
        token = tl.where(block_best > best, first + block_token, token)
        best = tl.maximum(best, block_best)
        block_highest, where = tl.max(x, 0, return_indices=True)
        if WITH_MARGIN:
            block_second = tl.max(tl.where(column == first + where, -float("inf"), x), 0)
            second = tl.maximum(tl.minimum(highest, block_highest), tl.maximum(second, block_second))
        new_highest = tl.maximum(highest, block_highest, propagate_nan=tl.PropagateNan.ALL)
        # Whatever is no number makes the sums none.
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


@jit
def _moved(moment, total, highest, new_highest):
    """A and its S, of a maximum, expressed in a higher one. What weighs nothing there may be infinitely far away."""
    shift = highest - new_highest
    decay = tl.exp(shift)
    return tl.where(decay > 0, (moment + total * shift) * decay, 0.0)


@jit
def _combine_statistics_kernel(
    floats, tokens, token, token_logit, log_total, negative_entropy, top2, num_splits,
    WITH_ENTROPY: tl.constexpr,
    WITH_MARGIN: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program: the splits of a row."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    exists = split < num_splits
    at = row * num_splits + split
    highest = tl.load(floats + at * 5, mask=exists, other=-float("inf"))
    total = tl.load(floats + at * 5 + 1, mask=exists, other=0.0)
    best = tl.load(floats + at * 5 + 3, mask=exists, other=-float("inf"))
    of_split = tl.load(tokens + at, mask=exists, other=0)

    # The first of equals: splits are in the order of the vocabulary.
    row_best, winner = tl.max(best, 0, return_indices=True)
    tl.store(token + row, tl.sum(tl.where(split == winner, of_split, 0), 0).to(tl.int64))
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
        tl.store(top2 + row * 2 + 1, tl.max(tl.where(split == leader, second, highest), 0))


@operator("token_statistics")
def token_statistics(
    logits: torch.Tensor, forbidden_token: int, with_entropy: bool, with_margin: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The greedy token of each row and the statistics that confidence, entropy and margin come from.

    Args:
        logits: ``[num_rows, vocab_size]``, float32, float16 or bfloat16.
        forbidden_token: column that is never the token, such as the mask's; −1 for none.
        with_entropy, with_margin: whether the last two results are wanted; empty otherwise.

    Returns:
        token: int64 ``[num_rows]``.
        token_logit, log_total, negative_entropy: float32 ``[num_rows]``.
        top2: float32 ``[num_rows, 2]``, the larger first.

    Raises:
        ValueError: logits that are not ``[num_rows, vocab_size]`` with a token to choose (two for a margin), or a
            forbidden column outside them.
    """
    _check(logits, forbidden_token, with_margin)
    num_rows, vocab_size = logits.shape
    results = token, token_logit, log_total, negative_entropy, top2 = _empty_results(logits, with_entropy, with_margin)
    rows_per_chunk = max(1, _LOGITS_PER_CHUNK // vocab_size)
    buffer = logits.new_empty(min(rows_per_chunk, num_rows), vocab_size, dtype=torch.float32)
    # Logits come from memory once; what takes several passes over a row takes them here.
    for start in range(0, num_rows, rows_per_chunk):
        rows = slice(start, start + rows_per_chunk)
        chunk = logits[rows].float()
        token[rows] = best = _argmax(chunk)
        highest = chunk.gather(1, best[:, None])
        if with_margin:
            others = buffer[: chunk.shape[0]].copy_(chunk).scatter_(1, best[:, None], -torch.inf)
            top2[rows] = torch.cat((highest, others.amax(dim=-1, keepdim=True)), dim=1)
        p = torch.sub(chunk, highest, out=buffer[: chunk.shape[0]]).exp_()
        total = p.sum(dim=-1, keepdim=True)
        token_logit[rows] = highest[:, 0]
        log_total[rows] = total.log().add_(highest)[:, 0]
        if with_entropy:
            p.div_(total)
            negative_entropy[rows] = (p + _ENTROPY_EPS).log_().mul_(p).sum(dim=-1)
    barred = (token == forbidden_token).nonzero()[:, 0]
    if barred.numel():
        others = logits[barred].float()
        others[:, forbidden_token] = -torch.inf
        token[barred] = best = _argmax(others)
        token_logit[barred] = others.gather(1, best[:, None])[:, 0]
    return results


@token_statistics.register_kernel("CUDA")
def token_statistics_with_triton(
    logits: torch.Tensor, forbidden_token: int, with_entropy: bool, with_margin: bool, num_splits: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``token_statistics`` in Triton; ``num_splits`` programs share a row (None: as many as fill the device)."""
    _check(logits, forbidden_token, with_margin)
    results = _empty_results(logits, with_entropy, with_margin)
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return results
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    block = min(2048, triton.next_power_of_2(vocab_size))
    num_blocks = triton.cdiv(vocab_size, block)
    if num_splits is None:
        wanted = 4 * torch.cuda.get_device_properties(logits.device).multi_processor_count
        num_splits = max(1, min(wanted // num_rows, num_blocks))
    per_split = triton.cdiv(num_blocks, num_splits) * block
    num_splits = triton.cdiv(vocab_size, per_split)
    floats = logits.new_empty(num_rows, num_splits, 5, dtype=torch.float32)
    tokens = logits.new_empty(num_rows, num_splits, dtype=torch.int32)
    _partial_statistics_kernel[num_rows, num_splits](
        logits, floats, tokens, vocab_size, logits.stride(0), forbidden_token, per_split,
        WITH_ENTROPY=with_entropy,
        WITH_MARGIN=with_margin,
        BLOCK=block,
    )  # fmt: skip
    _combine_statistics_kernel[(num_rows,)](
        floats, tokens, *results, num_splits,
        WITH_ENTROPY=with_entropy,
        WITH_MARGIN=with_margin,
        BLOCK_S=triton.next_power_of_2(num_splits),
    )  # fmt: skip
    return results


@token_statistics.register_fake
def _(
    logits: torch.Tensor, forbidden_token: int, with_entropy: bool, with_margin: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_results(logits, with_entropy, with_margin)


def token_statistics_reference(
    logits: torch.Tensor, forbidden_token: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The formulas, in float64."""
    logits = logits.double()
    allowed = logits.clone()
    if forbidden_token >= 0:
        allowed[:, forbidden_token] = -torch.inf
    token = allowed.argmax(dim=-1)
    p = logits.softmax(dim=-1)
    return (
        token,
        logits.gather(-1, token[:, None])[:, 0],
        logits.logsumexp(dim=-1),
        (p * (p + _ENTROPY_EPS).log()).sum(dim=-1),
        logits.sort(dim=-1, descending=True).values[:, :2],
    )


def _argmax(x: torch.Tensor) -> torch.Tensor:
    """The lowest index of each row's maximum; NumPy's search is vectorised, PyTorch's on a CPU is not."""
    return torch.from_numpy(np.argmax(x.numpy(), axis=-1))


def _empty_results(
    logits: torch.Tensor, with_entropy: bool, with_margin: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows = logits.shape[0]

    def floats(*shape: int) -> torch.Tensor:
        return logits.new_empty(shape, dtype=torch.float32)

    return (
        logits.new_empty(num_rows, dtype=torch.int64),
        floats(num_rows),
        floats(num_rows),
        floats(num_rows if with_entropy else 0),
        floats(num_rows if with_margin else 0, 2),
    )


def _check(logits: torch.Tensor, forbidden_token: int, with_margin: bool) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits {list(logits.shape)} are not [num_rows, vocab_size]")
    vocab_size = logits.shape[1]
    if not -1 <= forbidden_token < vocab_size:
        raise ValueError(f"forbidden_token={forbidden_token} is not a column of logits {list(logits.shape)}, nor -1")
    needed = max(2 if with_margin else 1, 2 if forbidden_token >= 0 else 1)
    if vocab_size < needed:
        raise ValueError(f"logits {list(logits.shape)}: at least {needed} tokens are needed")
