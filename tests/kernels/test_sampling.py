"""Counter-based random numbers."""

import math

import pytest
import torch

from dllm_engine.kernels import sampling
from dllm_engine.kernels.sampling import NO_TOKEN, gumbel_of, uniform
from tests.kernels.checks import FILTERS, check_filtered_logits


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


@pytest.mark.parametrize(("top_p", "top_k"), FILTERS)
def test_filters_equal_the_formula(monkeypatch, top_p, top_k):
    monkeypatch.setattr(sampling, "_NUMBERS_AT_ONCE", 300)
    check_filtered_logits(sampling.filtered_logits, 150, top_p, top_k, torch.bfloat16)
