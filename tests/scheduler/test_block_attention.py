"""Requests to models whose attention goes by blocks: where blocks lie, and what is
refused.
"""

import re
from typing import Any

import pytest

from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.families import DREAM, FAMILIES, LLADA2, SDAR
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.errors import InvalidRequestError
from tests.support.engines import start_engine
from tests.support.plans import resolved


@pytest.mark.parametrize(("family", "expected"), [(SDAR, 4), (LLADA2, 32), (DREAM, 3)])
def test_a_block_is_longer_than_the_response_only_where_attention_goes_by_it(
    family, expected
):
    assert resolved(family, gen_length=3).layout.block_length == expected
    assert resolved(SDAR, gen_length=3, block_length=16).layout.canvas_length == 16, (
        "where a request names another length, too"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("suffix_blocks", 1),
        (
            "response_template",
            [None, 7, None],
        ),  # before given text, in the block and over blocks
        ("response_template", [None] * 9 + [7]),
        ("block_add_threshold", 0.5),
        ("slow_fast", {}),
    ],
)
def test_what_needs_attention_to_later_blocks_is_refused_by_name(option, value):
    rule: dict[str, Any] = {} if option == "slow_fast" else {"threshold": 0.9}
    length = len(value) if isinstance(value, list) else 3
    said = re.escape(f"{option}={value}: attention of SDAR goes by blocks: ")
    with pytest.raises(
        InvalidRequestError, match=f"^{said}.*; leave it unset, or use a model that"
    ):
        resolved(SDAR, gen_length=length, **rule, **{option: value})


def test_an_engine_does_not_start_with_what_it_must_refuse(tiny_sdar):
    with pytest.raises(ValueError, match=r"^slow_fast={}: attention of"):
        start_engine(tiny_sdar, request_defaults={"slow_fast": {}})


def test_steps_are_counted_with_what_the_last_block_adds():
    assert resolved(SDAR, gen_length=8, steps=10).schedule.steps == 10
    with pytest.raises(
        InvalidRequestError,
        match=r"steps=11 .* here 8 and 2 behind it in its last block",
    ):
        resolved(SDAR, gen_length=8, steps=11)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
@pytest.mark.parametrize("method", CACHE_METHODS)
def test_a_method_that_does_not_suit_the_attention_is_refused_by_name(method, family):
    options = EngineOptions(cache_method=method)
    if family.attention in CACHE_METHODS[method].attention:
        assert options.with_paper_settings("model", family).cache_method == method
    else:
        with pytest.raises(
            ValueError,
            match=(
                f"^cache_method='{method}' does not suit {family.name}: .* choose .*none"
            ),
        ):
            options.with_paper_settings("model", family)
