r"""The statistics of each row of logits that unmasking needs, in one pass over the
vocabulary.

For logits l_1 … l_V of a row, and p = softmax(l):

    token            = argmax_j l_j, j other than a forbidden token; the lowest j on a
    tie
    log_total        = log Σ_j exp(l_j);  the token's probability is exp(token_logit −
    log_total)
    top2             = the two largest l_j;  the margin is the difference of their
    probabilities
    negative_entropy = Σ_j p_j log(p_j + ε),  ε = 1e-10

The forbidden token counts in all statistics but ``token``. One pass keeps the running
maximum m and the sums S = Σ exp(l_j − m) and A = Σ exp(l_j − m)(l_j − m), which it
rescales when m grows; then log_total = m + log S and Σ p_j log p_j = A/S − log S. This
leaves out ε, which would add Σ p_j log(1 + ε/p_j): between 0 and V·ε, about 1e-5. The
CPU makes a second pass and includes ε.

Shards i of a vocabulary are combined from these numbers: log_total = log Σ_i
exp(log_total_i) and, with w_i = exp(log_total_i − log_total), negative_entropy = Σ_i
w_i (negative_entropy_i + log w_i).
"""

import torch
from torch import Tensor

from dllm_engine.kernels._operator import Operator

_ENTROPY_EPS = 1e-10


@Operator
def token_statistics(
    logits: Tensor, forbidden_token: int, *, with_entropy: bool, with_margin: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The greedy token of each row and the statistics that confidence, entropy and
    margin come from.

    Args:
        logits: ``[num_rows, vocab_size]``, float32, float16 or bfloat16.
        forbidden_token: column that is never the token, such as the mask's; −1 for
            none.
        with_entropy, with_margin: whether to compute ``negative_entropy`` and ``top2``.

    Returns:
        token: int64 ``[num_rows]``.
        token_logit, log_total, negative_entropy: float32 ``[num_rows]``; the last empty
        unless asked for.
        top2: float32 ``[num_rows, 2]``, the larger first; empty unless asked for.
    """
    logits = logits.float()
    highest = logits.amax(dim=-1, keepdim=True)
    p = (logits - highest).exp_()
    total = p.sum(dim=-1, keepdim=True)
    log_total = (total.log() + highest)[:, 0]
    allowed = logits
    if forbidden_token >= 0:
        allowed = logits.clone()
        allowed[:, forbidden_token] = -torch.inf
    token_logit, token = allowed.max(dim=-1)
    negative_entropy = highest.new_empty(0)
    top2 = highest.new_empty(0, 2)
    if with_entropy:
        p.div_(total)
        negative_entropy = (p + _ENTROPY_EPS).log_().mul_(p).sum(dim=-1)
    if with_margin:
        top2 = logits.topk(2, dim=-1).values
    return token, token_logit, log_total, negative_entropy, top2
