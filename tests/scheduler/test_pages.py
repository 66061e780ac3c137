"""Reservation and allocation of pages over vLLM's own block pool, and how many requests
reserve.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash

from dllm_engine.cache_methods.page_demand import PageDemand
from dllm_engine.decoding.canvas_layout import Blocks
from dllm_engine.decoding.page_layout import PoolGeometry
from dllm_engine.families import SDAR
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.page_pool import PagePool
from tests.support.plans import FULL_METHODS, draw_cache_options, spec_of


def test_the_end_of_a_prefix_is_used_again_first():
    pool = PagePool(num_pages=11, hash_block_size=16, shares=True)
    keys = [BlockHash(bytes([number])) for number in range(2)]
    pool.reserve("a", 4)
    pool.resize("a", [2, 2])
    pool.add_keys("a", keys, num_tables=2)
    pool.free("a")
    pool.reserve("b", 8)
    pool.resize("b", [4, 4])
    assert [len(table) for table in pool.find(keys, 2)] == [1, 1]


def test_a_page_that_holds_no_row_of_features_is_refused_with_the_smallest_that_does():
    small = PoolGeometry(
        page_size=1,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        hidden_size=40,
        total_kv_heads=1,
    )
    for method in ("dllm_cache", "maskkv"):
        engine = EngineOptions(cache_method=method, page_size=1)
        with pytest.raises(
            ValueError,
            match=r"page_size=1 is too small.*16 numbers.*row of 40.* works is 3",
        ):
            PageDemand(engine.method, small).upper_bound(engine.cache, 64)


@pytest.mark.parametrize(
    ("method", "cache_options"),
    [("block", {"sub_block_cache": True}), ("focus", {}), ("block", {})],
)
def test_the_last_block_is_kept_whole_beyond_the_longest_request(method, cache_options):
    engine = EngineOptions(
        cache_method=method, cache_options=cache_options, page_size=4
    )
    geometry = PoolGeometry(
        page_size=4,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        hidden_size=8,
        total_kv_heads=1,
    )
    pages = PageDemand(engine.method, geometry)
    longest = pages.upper_bound(
        engine.cache, replace(SDAR, default_block_length=32).longest_canvas(33)
    )
    request = spec_of(
        cache=engine.cache,
        prompt_length=16,
        gen_length=17,
        block_length=32,
        attention="block_causal",
        attention_block=32,
    )
    assert request.layout.canvas_length == 64
    assert pages.peak(request) <= longest
    keeps_last = engine.cache.keeps_running_block
    assert pages.peak(request) == geometry.num_layers * (64 if keeps_last else 32) // 4


@pytest.mark.parametrize("method", FULL_METHODS)
def test_no_request_needs_more_pages_than_the_longest_or_holds_more_than_it_needs(
    method,
):
    for seed in range(100):
        draw = random.Random(seed)
        page_size = draw.randint(1, 9)
        heads = draw.choice([1, 2, 4])
        ranks = draw.randint(1, 2)
        engine = EngineOptions(
            cache_method=method,
            cache_options=draw_cache_options(draw, method),
            page_size=page_size,
        )
        sizes: dict[str, Any] = {
            "page_size": page_size,
            "hidden_size": draw.choice([8, 16]),
            "num_layers": 4,
            "head_dim": 8,
        }
        geometry = PoolGeometry(
            **sizes,
            num_heads=max(1, heads // ranks),
            num_kv_heads=max(1, heads // ranks),
            total_kv_heads=heads,
        )
        longest = draw.randint(2, 60)
        canvas = draw.choice([longest, draw.randint(2, longest)])
        # Where little is left of a short prompt, rounding matters most.
        prompt_length = draw.randint(1, draw.choice([min(5, canvas - 1), canvas - 1]))
        request = spec_of(
            cache=engine.cache,
            prompt_length=prompt_length,
            gen_length=canvas - prompt_length,
            steps=13,
            block_length=draw.randint(1, canvas - prompt_length),
            block_add_threshold=draw.choice([None, draw.random()]),
            shifts_logits=draw.random() < 0.5,
            suffix_blocks=draw.choice([None, draw.randint(0, 5)]),
        )
        pages = PageDemand(engine.method, geometry)
        demand = pages.peak(request)
        assert demand <= pages.upper_bound(engine.cache, longest), seed
        first = draw.randrange(request.layout.num_blocks)
        most = (
            first + 1
            if request.schedule.block_add_threshold is None
            else request.layout.num_blocks
        )
        held = pages.held(request, Blocks(first, draw.randint(first + 1, most)))
        assert sum(map(sum, held.values())) <= demand, seed


@pytest.mark.parametrize("scope", ["bidirectional", "prefix"])
@pytest.mark.parametrize("page_size", [3, 8])
def test_no_window_needs_more_pages_beside_a_shared_prompt(page_size, scope):
    """While pages in order grow, those of retained tokens become fewer."""
    engine = EngineOptions(
        cache_method="sparse",
        cache_options={"refresh": "response", "scope": scope, "retention_ratio": 0.2},
        page_size=page_size,
    )
    geometry = PoolGeometry(
        page_size=page_size,
        hidden_size=8,
        num_layers=4,
        head_dim=8,
        num_heads=1,
        num_kv_heads=1,
        total_kv_heads=1,
    )
    pages = PageDemand(engine.method, geometry, share_prompts=True)
    for prompt_length in range(1, 20):
        spec = spec_of(
            cache=engine.cache,
            prompt_length=prompt_length,
            num_sharable=prompt_length,
            gen_length=40,
        )
        most = pages.peak(spec)
        for block in range(spec.layout.num_blocks):
            assert pages.num_held(spec, Blocks(block, block + 1)) <= most


@pytest.mark.parametrize(
    ("method", "options", "whole"),
    [
        ("block", {}, False),
        ("block", {"sub_block_cache": True}, True),
        ("focus", {}, True),
    ],
)
def test_what_pages_hold_of_a_running_block_is_reserved_for_the_whole_response(
    method, options, whole
):
    engine = EngineOptions(cache_method=method, cache_options=options)
    geometry = PoolGeometry(
        page_size=4,
        hidden_size=8,
        num_layers=2,
        head_dim=8,
        num_heads=1,
        num_kv_heads=1,
        total_kv_heads=1,
    )
    spec = spec_of(cache=engine.cache, attention="block_causal", gen_length=40)
    pages = PageDemand(engine.method, geometry)
    reserved = pages.at_admission(spec, Blocks(0, 1))
    assert (reserved == pages.peak(spec)) == whole
