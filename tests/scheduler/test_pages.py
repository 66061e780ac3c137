"""Reservation and allocation of pages over vLLM's own block pool, and how many requests
reserve.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from dllm_engine.cache_methods.page_demand import PageDemand
from dllm_engine.decoding.canvas_layout import Blocks, CanvasLayout
from dllm_engine.decoding.page_layout import PoolGeometry
from dllm_engine.families import SDAR
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.page_pool import PagePool, prefix_keys
from tests.support.plans import FULL_METHODS, draw_cache_options, spec_of

HASHES = [bytes([i]) * 32 for i in range(6)]


def keys_of(num_tokens: int, block_length: int = 16, hashes=HASHES) -> list[bytes]:
    layout = CanvasLayout(num_tokens, 1, block_length, "block_causal")
    return prefix_keys(hashes, 16, layout, range(num_tokens // 16))


@pytest.fixture
def sharing() -> PagePool:
    """Ten pages; request a has filled two pages in each of two tables."""
    pool = PagePool(num_pages=11, hash_block_size=16, shares=True)
    pool.reserve("a", 6)
    pool.resize("a", [2, 2])
    pool.add_keys("a", keys_of(32), 2)
    return pool


@pytest.mark.parametrize(
    ("block_length", "num_tokens", "covered"),
    # By how many tokens each page's key is told.
    [
        (16, 48, [16, 32, 48]),
        (4, 48, [16, 32, 48]),
        (32, 64, [32, 32, 64, 64]),
        (24, 48, [32, 48, 48]),
        (96, 32, [96] * 2),
    ],
)
def test_a_key_is_of_all_tokens_up_to_the_end_of_the_last_block_in_the_page(
    block_length, num_tokens, covered
):
    keys = keys_of(num_tokens, block_length)
    assert [key[:32] for key in keys] == [
        HASHES[tokens // 16 - 1] for tokens in covered
    ]
    assert len(set(keys)) == len(keys)
    assert not set(keys) & set(keys_of(96, block_length + 1)), (
        "another block length is another function"
    )
    assert len(keys_of(96, 32, HASHES[:3])) == 2, (
        "a page whose last block is not known yet has none"
    )


def test_shared_pages_count_once_and_outlive_their_first_request(sharing):
    found = sharing.find(keys_of(96), 2)
    sharing.reserve("b", 8, found)
    assert (sharing.num_allocated, sharing.num_reserved) == (4, 10)
    assert not sharing.can_reserve(1)
    tables = sharing.resize("b", [4, 4])
    assert [table[:2] for table in tables] == sharing.resize("a", [2, 2])
    sharing.free("a")
    assert (sharing.num_allocated, sharing.num_reserved) == (8, 8)
    sharing.free("b")
    assert (sharing.num_allocated, sharing.num_reserved) == (0, 0)
    assert len(sharing.find(keys_of(96), 2)[0]) == 2, (
        "they stay until the pool needs them"
    )
    sharing.reserve("c", 10, sharing.find(keys_of(96), 2))
    assert (sharing.num_allocated, sharing.num_reserved) == (4, 10)


def test_the_end_of_a_prefix_is_used_again_first(sharing):
    sharing.free("a")
    sharing.reserve("b", 8)
    sharing.resize("b", [4, 4])
    assert [len(table) for table in sharing.find(keys_of(96), 2)] == [1, 1]


def test_the_next_page_is_copied_as_long_as_it_holds_the_same(sharing):
    """It is overwritten by the request that it is given to, behind copies of the same
    step.
    """
    found = sharing.find(keys_of(96), 2)
    sharing.note_next("a", 1, [7, 8], 2)
    sharing.free("a")
    sharing.begin_step()
    first = found[0][0]
    following = sharing.find_next(first)
    assert following is not None
    assert following.pages == [table[1] for table in found]
    sharing.reserve("b", 10, [table[:1] for table in found])
    sources, copies = sharing.append_copies("b", following.pages)
    tables = sharing.resize("b", [5, 5])
    assert tables[0][:2] == [first.block_id, copies[0]]
    assert {*sources} <= {*tables[0], *tables[1]}
    assert sharing.find_next(first) == following
    sharing.begin_step()
    assert sharing.find_next(first) is None


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
            PageDemand(engine.method, small).longest(engine.cache, 64)


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
    longest = pages.longest(
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
    assert pages.most(request) <= longest
    keeps_last = engine.cache.keeps_running_block
    assert pages.most(request) == geometry.num_layers * (64 if keeps_last else 32) // 4


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
        demand = pages.most(request)
        assert demand <= pages.longest(engine.cache, longest), seed
        first = draw.randrange(request.layout.num_blocks)
        most = (
            first + 1
            if request.schedule.block_add_threshold is None
            else request.layout.num_blocks
        )
        held = pages.held(request, Blocks(first, draw.randint(first + 1, most)))
        assert sum(map(sum, held.values())) <= demand, seed


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
    assert (reserved == pages.most(spec)) == whole
