"""Statistics of rows of logits, on the CPU, against their formulas in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.kernels.token_statistics import token_statistics
from tests.kernels.checks import draw
from tests.support.kernels import TOLERANCE


@given(
    num_rows=st.integers(0, 9),
    vocab_size=st.one_of(st.integers(2, 5), st.integers(2, 3000)),
    forbidden=st.floats(0, 1) | st.none(),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_equals_the_formulas(num_rows, vocab_size, forbidden, scale, dtype, seed):
    logits = (draw(dtype, seed).normal(num_rows, vocab_size + 3) * scale)[:, :vocab_size]
    column = -1 if forbidden is None else round(forbidden * (vocab_size - 1))
    token, *statistics = token_statistics(logits, column, True, True)
    logits = logits.double()
    allowed = logits.masked_fill(torch.arange(vocab_size) == column, -torch.inf)
    assert torch.equal(token, allowed.argmax(dim=-1))  # ties too: rounded logits have many
    p = logits.softmax(dim=-1)
    token_logit, entropy = logits.gather(-1, token[:, None])[:, 0], (p * (p + 1e-10).log()).sum(dim=-1)
    expected = [token_logit, logits.logsumexp(dim=-1), entropy, logits.sort(dim=-1, descending=True).values[:, :2]]
    torch.testing.assert_close([x.double() for x in statistics], expected, rtol=1e-5, atol=1e-5)
