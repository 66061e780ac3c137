r"""The statistics of each row of logits that unmasking needs, in one pass over the vocabulary.

For logits l_1 … l_V of a row, and p = softmax(l):

    token            = argmax_j l_j, j other than a forbidden token; the lowest j on a tie
    log_total        = log Σ_j exp(l_j);  the token's probability is exp(token_logit − log_total)
    top2             = the two largest l_j;  the margin is the difference of their probabilities
    negative_entropy = Σ_j p_j log(p_j + ε),  ε = 1e-10

The forbidden token counts in all of them but the first. One pass keeps the running maximum m and the sums
S = Σ exp(l_j − m) and A = Σ exp(l_j − m)(l_j − m), which it rescales when m grows; then log_total = m + log S and
Σ p_j log p_j = A/S − log S. This leaves out ε, which adds Σ p_j log(1 + ε/p_j): between 0 and V·ε, about 1e-5. The CPU
takes a second pass and includes it.

The shards i of a vocabulary combine from these numbers alone: log_total = log Σ_i exp(log_total_i) and, with
w_i = exp(log_total_i − log_total), negative_entropy = Σ_i w_i (negative_entropy_i + log w_i).
"""

import numpy as np
import torch

from dllm_engine.kernels._operator import operator

_ENTROPY_EPS = 1e-10
_LOGITS_PER_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Logits handled at once. On a CPU, with their exponentials, 1 MiB, which stays in a core's cache between passes."""

_NUMBERS_FOR_NUMPY = 1 << 13
"""With fewer, calling NumPy takes longer than searching them."""


@operator("token_statistics:token_statistics")
def token_statistics(
    logits: torch.Tensor, forbidden_token: int, with_entropy: bool, with_margin: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The greedy token of each row and the statistics that confidence, entropy and margin come from.

    Args:
        logits: ``[num_rows, vocab_size]``, float32, float16 or bfloat16.
        forbidden_token: column that is never the token, such as the mask's; −1 for none.
        with_entropy, with_margin: whether to compute ``negative_entropy`` and ``top2``.

    Returns:
        token: int64 ``[num_rows]``.
        token_logit, log_total, negative_entropy: float32 ``[num_rows]``; the last empty unless asked for.
        top2: float32 ``[num_rows, 2]``, the larger first; empty unless asked for.

    Raises:
        ValueError: logits that are not ``[num_rows, vocab_size]`` with a token to choose (two for a margin), or a
            forbidden column outside them.
    """
    rows_per_chunk = max(1, _LOGITS_PER_CHUNK[logits.device.type] // logits.shape[1])
    if 0 < logits.shape[0] <= rows_per_chunk:
        return _of_chunk(logits, forbidden_token, with_entropy, with_margin, None)
    results = empty_results(logits, forbidden_token, with_entropy, with_margin)
    buffer = logits.new_empty(rows_per_chunk, logits.shape[1], dtype=torch.float32)
    # Several passes over a chunk that is in the cache, one over the logits in memory.
    for start in range(0, logits.shape[0], rows_per_chunk):
        rows = slice(start, start + rows_per_chunk)
        of_chunk = _of_chunk(logits[rows], forbidden_token, with_entropy, with_margin, buffer)
        for result, part in zip(results, of_chunk, strict=True):
            result[rows] = part
    return results


def _of_chunk(
    logits: torch.Tensor, forbidden_token: int, with_entropy: bool, with_margin: bool, buffer: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``buffer``: memory for as many logits or more, float32."""
    chunk = logits.float()
    buffer = torch.empty_like(chunk) if buffer is None else buffer[: chunk.shape[0]]
    highest, token = _largest(chunk)
    negative_entropy, top2 = highest.new_empty(0), highest.new_empty(0, 2)
    if with_margin:
        others = buffer.copy_(chunk).scatter_(1, token, -torch.inf)
        top2 = torch.cat((highest, others.amax(dim=-1, keepdim=True)), dim=1)
    p = torch.sub(chunk, highest, out=buffer).exp_()
    total = p.sum(dim=-1, keepdim=True)
    log_total = total.log().add_(highest)
    if with_entropy:
        p.div_(total)
        negative_entropy = (p + _ENTROPY_EPS).log_().mul_(p).sum(dim=-1)
    token, token_logit = token[:, 0], highest[:, 0]
    if forbidden_token in token.tolist():
        barred = (token == forbidden_token).nonzero()[:, 0]
        others = chunk[barred]
        others[:, forbidden_token] = -torch.inf
        logit, best = _largest(others)
        token, token_logit = token.index_copy(0, barred, best[:, 0]), token_logit.index_copy(0, barred, logit[:, 0])
    return token, token_logit, log_total[:, 0], negative_entropy, top2


def empty_results(
    logits: torch.Tensor, forbidden_token: int, with_entropy: bool, with_margin: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for the operator's results."""
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


@token_statistics.register_check
def _(logits: torch.Tensor, forbidden_token: int, with_entropy: bool, with_margin: bool) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits {list(logits.shape)} are not [num_rows, vocab_size]")
    vocab_size = logits.shape[1]
    if not -1 <= forbidden_token < vocab_size:
        raise ValueError(f"forbidden_token={forbidden_token} is not a column of logits {list(logits.shape)}, nor -1")
    needed = max(2 if with_margin else 1, 2 if forbidden_token >= 0 else 1)
    if vocab_size < needed:
        raise ValueError(f"logits {list(logits.shape)}: at least {needed} tokens are needed")


def _largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's maximum and its lowest index, ``[num_rows, 1]`` each. NumPy's search is vectorized, PyTorch's on a CPU
    is not."""
    if x.is_cuda or x.numel() < _NUMBERS_FOR_NUMPY:
        return x.max(dim=-1, keepdim=True)
    index = torch.from_numpy(np.argmax(x.numpy(), axis=-1))[:, None]
    return x.gather(1, index), index
