"""Accuracy lost against plain decoding."""

import pytest

from dllm_engine.evaluation.comparison import mean_and_error
from dllm_engine.evaluation.tuning import Loss


def test_the_interval_is_that_of_bonett_and_price():
    # 100 pairs: 8 won by plain decoding, 2 by the setting. (8 - 2) / 102; √((10 + 2) / 102 - 0.0588²) / √102.
    plain = [1.0] * 98 + [0.0] * 2
    scores = [1.0] * 90 + [0.0] * 8 + [1.0] * 2
    loss = Loss.between(plain, scores, limit=6 / 102)
    error = (12 / 102 - (6 / 102) ** 2) ** 0.5 / 102**0.5
    assert loss.observed == pytest.approx(0.06)
    assert loss.highest == pytest.approx(6 / 102 + 1.645 * error, abs=1e-4)
    assert loss.lowest == pytest.approx(6 / 102 - 1.645 * error, abs=1e-4)
    assert loss.probability == pytest.approx(0.5)


def test_few_equal_answers_show_little():
    few, many = (Loss.between([1.0] * count, [1.0] * count, limit=0.01) for count in (10, 500))
    assert few.observed == many.observed == 0
    assert few.highest > 0.1
    assert many.highest < 0.01
    assert few.probability < 0.6 < 0.95 < many.probability


def test_only_examples_of_both_count():
    assert Loss.between([1.0, 1.0, 0.0], [1.0], limit=0.0).observed == 0
    assert Loss.between([], [], limit=0.0).observed == 0


def test_standard_error_of_an_accuracy():
    assert mean_and_error([1.0] * 8 + [0.0] * 2) == pytest.approx((0.8, (0.8 * 0.2 / 10) ** 0.5))
