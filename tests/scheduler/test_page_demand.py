"""Pages that requests hold are bounded by what is reserved for them."""

import random

import pytest

from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.page_layout import PoolGeometry
from dllm_engine.scheduler.request import Blocks
from tests.support.plans import FULL_METHODS, draw_cache_options, spec_of


def test_a_page_that_holds_no_row_of_features_is_refused_with_the_smallest_that_does():
    small = PoolGeometry(page_size=1, num_layers=2, num_kv_heads=1, head_dim=8, hidden_size=40, total_kv_heads=1)
    for method in ("dllm_cache", "maskkv"):
        engine = EngineOptions(cache_method=method, page_size=1)
        with pytest.raises(ValueError, match=r"page_size=1 is too small.*16 numbers.*row of 40.* works is 3"):
            engine.method.longest_demand(engine.cache, small, 64)


@pytest.mark.parametrize("method", FULL_METHODS)
def test_no_request_needs_more_pages_than_the_longest_or_holds_more_than_it_needs(method):
    for seed in range(100):
        draw = random.Random(seed)
        page_size, heads, ranks = draw.randint(1, 9), draw.choice([1, 2, 4]), draw.randint(1, 2)
        engine = EngineOptions(cache_method=method, cache_options=draw_cache_options(draw, method), page_size=page_size)
        sizes = {"page_size": page_size, "hidden_size": draw.choice([8, 16]), "num_layers": 4, "head_dim": 8}
        geometry = PoolGeometry(**sizes, num_kv_heads=max(1, heads // ranks), total_kv_heads=heads)
        max_model_len = draw.randint(2, 60)
        canvas = draw.choice([max_model_len, draw.randint(2, max_model_len)])
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
        demand = engine.method.page_demand(request, geometry)
        assert demand <= engine.method.longest_demand(engine.cache, geometry, max_model_len), seed
        first = draw.randrange(request.num_blocks)
        most = first + 1 if request.block_add_threshold is None else request.num_blocks
        held = engine.method.held(request, Blocks(first, draw.randint(first + 1, most)), geometry)
        assert sum(map(sum, held.values())) <= demand, seed
