"""Counter-based random numbers."""

import math

import pytest
import torch

from dllm_engine.kernels import noise
from dllm_engine.kernels.noise import NO_TOKEN, filtered_logits, gumbel, uniform
from tests.kernels.checks import FILTERS, check_filtered_logits, check_gumbel_max


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
    """A seed must give the same response in every version. Worked out in plain integers."""
    assert uniform(*counters(*counter)).item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("bits", [-1, 0, 2**63 - 1, -(2**63), 1 << 11, (1 << 11) - 1])
def test_interval_is_open_whatever_the_bits(monkeypatch, bits):
    monkeypatch.setattr(noise, "_mix", lambda x: torch.full_like(x, bits))
    assert 0 < uniform(*counters(0, 0, 0, 0)).item() < 1
    assert math.isfinite(gumbel(*counters(0, 0, 0, 0)).item())


@pytest.mark.parametrize("first_token", [0, 75])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_draws_equal_the_formula(temperature, first_token):
    for seed in range(5):
        check_gumbel_max(noise.gumbel_max, 150, first_token, temperature, torch.bfloat16, seed)


@pytest.mark.parametrize(("top_p", "top_k"), FILTERS)
def test_filters_equal_the_formula(top_p, top_k):
    check_filtered_logits(noise.filtered_logits, 150, top_p, top_k, torch.bfloat16)


def test_of_equal_tokens_top_p_takes_the_first_and_top_k_all():
    logits = torch.tensor([[1.0, 2, 1, 2, 2, 1, 0, 2]])

    def kept(top_p: float, top_k: int, forbidden: int = -1) -> list[int]:
        return (filtered_logits(logits, 1.0, top_p, top_k, forbidden)[0] >= 0).nonzero()[:, 0].tolist()

    assert kept(0.3, 0) == [1, 3]  # each of the likeliest is 0.21
    assert kept(0.9, 0) == [0, 1, 2, 3, 4, 7]  # 0.85 before the first of the others, 0.93 before the second but one
    assert kept(1.0, 2) == [1, 3, 4, 7]
    assert kept(1.0, 5) == [0, 1, 2, 3, 4, 5, 7]
    assert kept(0.3, 1) == [1, 3]
    assert kept(1e-9, 0) == [1]
    assert kept(1e-9, 0, forbidden=1) == [1, 3]
    assert kept(1.0, 99) == list(range(8))
