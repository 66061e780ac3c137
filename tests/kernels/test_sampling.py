"""Counter-based random numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm_engine.kernels import sampling
from dllm_engine.kernels.sampling import NO_TOKEN, gumbel_of, uniform
from dllm_engine.kernels.token_statistics import token_statistics
from tests.kernels.checks import FILTERS, NUMBERS, check_filtered_logits, draw


def counters(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value], dtype=torch.int64) for value in values)


@pytest.mark.parametrize(
    ("counter", "expected"),
    [
        ((0, 0, 0, 0), 0.5213426007449149),
        ((1, 0, 0, 0), 0.23790083859216188),
        ((42, 3, 17, 126_000), 0.7934749279697352),
        ((-1, 0, 5, NO_TOKEN), 0.27452069305470406),
        ((2**63 - 1, 511, 4095, 151_999), 0.5125377016441441),
    ],
)
def test_values_never_change(counter, expected):
    """A seed must give the same response in every version. Worked out in plain
    integers.
    """
    assert uniform(*counters(*counter)).item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("bits", [-1, 0, 2**63 - 1, -(2**63), 1 << 11, (1 << 11) - 1])
def test_interval_is_open_whatever_the_bits(monkeypatch, bits):
    monkeypatch.setattr(sampling, "_mix", lambda x: torch.full_like(x, bits))
    assert 0 < uniform(*counters(0, 0, 0, 0)).item() < 1
    assert math.isfinite(gumbel_of(uniform(*counters(0, 0, 0, 0))).item())


@pytest.mark.parametrize("first_token", [0, 126_000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_draws_equal_the_formula(temperature, first_token):
    numbers = draw(torch.bfloat16)
    logits = numbers.normal(7, 153)[:, 3:] * 4
    logits[0, :75] = -torch.inf
    drawn = sampling.Counters(
        numbers.integers(-(2**63), 2**63 - 1, 7),
        *numbers.integers(0, 5000, 14).view(2, 7),
    )
    seeds, forwards, positions = (counter[:, None] for counter in drawn)
    tokens = first_token + torch.arange(150)
    drawn_numbers = uniform(seeds, forwards, positions, tokens)
    scores = logits.float() / temperature + gumbel_of(drawn_numbers)
    for forbidden in (-1, int(scores[3].argmax())):
        scores[:, forbidden] = -torch.inf if forbidden >= 0 else scores[:, forbidden]
        score, column = sampling.gumbel_max(
            logits, drawn, first_token, temperature, forbidden
        )
        assert torch.equal(column, scores.argmax(dim=1))
        torch.testing.assert_close(score, scores.amax(dim=1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("top_p", "top_k"), FILTERS)
def test_filters_equal_the_formula(monkeypatch, top_p, top_k):
    monkeypatch.setattr(sampling, "_NUMBERS_AT_ONCE", 300)
    check_filtered_logits(sampling.filtered_logits, 150, top_p, top_k, torch.bfloat16)


@given(
    num_rows=st.integers(0, 9),
    vocab_size=st.one_of(st.integers(2, 5), st.integers(2, 3000)),
    forbidden=st.floats(0, 1) | st.none(),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    numbers=NUMBERS,
)
def test_equals_the_formulas(num_rows, vocab_size, forbidden, scale, numbers):
    logits = (numbers.normal(num_rows, vocab_size + 3) * scale)[:, :vocab_size]
    column = -1 if forbidden is None else round(forbidden * (vocab_size - 1))
    token, *statistics = token_statistics(
        logits, column, with_entropy=True, with_margin=True
    )
    logits = logits.double()
    allowed = logits.masked_fill(torch.arange(vocab_size) == column, -torch.inf)
    assert torch.equal(
        token, allowed.argmax(dim=-1)
    )  # ties too: rounded logits have many
    p = logits.softmax(dim=-1)
    token_logit = logits.gather(-1, token[:, None])[:, 0]
    entropy = (p * (p + 1e-10).log()).sum(dim=-1)
    expected = [
        token_logit,
        logits.logsumexp(dim=-1),
        entropy,
        logits.sort(dim=-1, descending=True).values[:, :2],
    ]
    torch.testing.assert_close(
        [x.double() for x in statistics], expected, rtol=1e-5, atol=1e-5
    )
