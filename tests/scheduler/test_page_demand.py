"""Pages that requests hold are bounded by what is reserved for them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.page_layout import PageKind, PoolGeometry
from dllm_engine.scheduler.request import Blocks, DecodingSpec
from tests.support.plans import FULL_METHODS, engine_options, spec_of


def spec(cache, **changes) -> DecodingSpec:
    return spec_of(**({"steps": 13, "cache": cache} | changes))


def test_a_rank_reserves_for_all_that_may_fall_to_its_heads():
    engine = engine_options("maskkv", kv_budget=4)
    request = spec(engine.cache)
    # One of two ranks: 4 slots and 2 rows a page. Its head may be left all 8 of both heads, but not all 10.
    rank = PoolGeometry(page_size=4, num_layers=4, num_kv_heads=1, head_dim=8, hidden_size=32, total_kv_heads=2)
    kv, features = engine.method.pages(request, Blocks(0, 1), rank).values()
    assert kv == [4 * 29 // 4]
    assert features == [11] * 4
    # With a budget of 6 it could be 12, but the prompt has 10 tokens: 31 in all.
    engine = engine_options("maskkv", kv_budget=6)
    assert engine.method.pages(spec(engine.cache), Blocks(0, 1), rank)[PageKind.KV] == [4 * 31 // 4]


def test_a_page_that_holds_no_row_of_features_is_refused_with_the_smallest_that_does():
    small = PoolGeometry(page_size=1, num_layers=2, num_kv_heads=1, head_dim=8, hidden_size=40, total_kv_heads=1)
    for method in ("dllm_cache", "maskkv"):
        engine = EngineOptions(cache_method=method, page_size=1)
        with pytest.raises(ValueError, match=r"page_size=1 is too small.*16 numbers.*row of 40.* works is 3"):
            engine.method.longest_demand(engine.cache, small, 64)
    assert small.__class__(**(vars(small) | {"page_size": 3})).feature_pages(5) == 5


OF_NO_PLAN = {"scorer", "head_budget", "observation_window", "pool_kernel_size", "keep_schedule"}
OF_NO_PLAN |= {"similarity_metric", "sigma", "confidence", "range_unit"}
"""Options that change no plan, some of which do not go with others."""


def values(schema: dict[str, Any]) -> st.SearchStrategy:
    """Of an option, by its JSON schema."""
    if "anyOf" in schema:
        return st.one_of([values(kind) for kind in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if schema["type"] == "number":
        return st.floats(schema["minimum"], schema["maximum"]) | st.just(schema["maximum"])
    if schema["type"] == "integer":
        return st.integers(schema["minimum"], schema["minimum"] + 40)
    return {"boolean": st.booleans(), "null": st.none()}[schema["type"]]


@pytest.mark.parametrize("method", FULL_METHODS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_request_needs_more_pages_than_the_longest(method, data):
    schemas = FULL_METHODS[method].options.model_json_schema().get("properties", {})
    drawn = {name: values(schema) for name, schema in schemas.items() if name not in OF_NO_PLAN}
    options = data.draw(st.fixed_dictionaries(drawn), label="options")
    page_size, heads, ranks = data.draw(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 4]), st.integers(1, 2)))
    engine = EngineOptions(cache_method=method, cache_options=options, page_size=page_size)
    geometry = PoolGeometry(
        page_size=page_size,
        num_layers=4,
        num_kv_heads=max(1, heads // ranks),
        head_dim=8,
        hidden_size=data.draw(st.sampled_from([8, 16])),
        total_kv_heads=heads,
    )
    max_model_len = data.draw(st.integers(2, 60), label="max_model_len")
    canvas = data.draw(st.just(max_model_len) | st.integers(2, max_model_len), label="canvas")
    # Where little is left of a short prompt, rounding matters most.
    prompt_length = data.draw(st.integers(1, min(5, canvas - 1)) | st.integers(1, canvas - 1), label="prompt_length")
    gen_length = canvas - prompt_length
    request = spec(
        engine.cache,
        prompt_length=prompt_length,
        gen_length=gen_length,
        block_length=data.draw(st.integers(1, gen_length), label="block_length"),
        block_add_threshold=data.draw(st.none() | st.floats(0, 1), label="block_add_threshold"),
        shifts_logits=data.draw(st.booleans(), label="shifts_logits"),
        suffix_blocks=data.draw(st.none() | st.integers(0, 5), label="suffix_blocks"),
    )
    demand = engine.method.page_demand(request, geometry)
    assert demand <= engine.method.longest_demand(engine.cache, geometry, max_model_len)
    first = data.draw(st.integers(0, request.num_blocks - 1), label="first running block")
    most = first + 1 if request.block_add_threshold is None else request.num_blocks
    running = Blocks(first, data.draw(st.integers(first + 1, most), label="stop"))
    held = engine.method.held(request, running, geometry)
    assert sum(map(sum, held.values())) <= demand
