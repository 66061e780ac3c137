"""The certainty prior: how much is known near a position."""

from types import SimpleNamespace

import numpy as np
import pytest

from dllm_engine.model_executor.unmasking.certainty import certainty_density
from tests.oracles.decoding import Decoding

MASK = 0


def plain(known: list[bool], sigma: float) -> list[float]:
    model = SimpleNamespace(mask=MASK, is_dream=False, block_length=None)
    run = Decoding(model, [1, 2], gen_length=len(known), block_length=len(known))
    run.canvas[2:] = [7 if is_known else MASK for is_known in known]
    return run.density(sigma)


@pytest.mark.parametrize("sigma", [0.3, 2.0, 10.0, 400.0])
@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_equals_the_sum_over_all_positions(size, sigma):
    draw = np.random.default_rng(size)
    for share in (0.0, 0.3, 0.9):
        known = draw.random(size) < share
        assert certainty_density(known, sigma) == pytest.approx(plain(known.tolist(), sigma), abs=1e-12)
