"""What the cache methods promise beyond the reference cases."""

import random

import pytest
import torch

from tests.support.engines import assert_nothing_left, generate, runner_of, scheduler_of

PAGE_SIZE = 8
REQUEST = {"gen_length": 40, "block_length": 8, "ignore_eos": True}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of the tiny checkpoints' vocabulary (the mask and end tokens are its last two)."""
    draw = random.Random(seed)
    return [[draw.randrange(100) for _ in range(draw.randrange(5, 120))] for _ in range(count)]


@pytest.fixture
def engine(engines, tiny_llada):
    def make(cache_method, model=None, **options):
        return engines(model or tiny_llada, page_size=PAGE_SIZE, cache_method=cache_method, cache_options=options)

    return make


def responses(llm, asked, **params):
    from dllm_engine import DiffusionParams

    return [list(o.outputs[0].token_ids) for o in generate(llm, asked, DiffusionParams(**(REQUEST | params)))]


@pytest.mark.parametrize("model", ["tiny_llada", "tiny_dream"])
def test_retaining_everything_at_once_is_the_dual_cache(engine, request, model):
    checkpoint = request.getfixturevalue(model)
    asked = prompts(6)
    sparse = engine("sparse", checkpoint, retention_ratio=1.0, update_delay=0)
    assert responses(sparse, asked) == responses(engine("dual", checkpoint), asked)


@pytest.mark.parametrize("model", ["tiny_llada", "tiny_dream"])
def test_refreshing_dkv_in_every_step_is_no_cache(engine, request, model):
    checkpoint = request.getfixturevalue(model)
    asked = prompts(6, seed=7)
    uncached, cached = engine("none", checkpoint), engine("dkv", checkpoint, refresh_interval=1)
    for lengths in ({}, {"block_length": 40}):
        assert responses(cached, asked, **lengths) == responses(uncached, asked, **lengths)


@pytest.mark.parametrize("model", ["tiny_llada", "tiny_dream"])
@pytest.mark.parametrize(
    ("cache_method", "options"),
    [
        ("prefix", {}),
        ("dual", {}),
        ("sparse", {"retention_ratio": 0.4}),
        ("sparse", {"retention_ratio": 0.4, "update_delay": 3, "scope": "prefix"}),
        ("dkv", {"refresh_interval": 5}),
        ("freecache", {}),
        ("freecache", {"include_suffix": False}),
    ],
)
def test_requests_in_all_states_share_a_batch(engine, request, model, cache_method, options):
    from dllm_engine import DiffusionParams

    llm = engine(cache_method, request.getfixturevalue(model), **options)
    asked = prompts(9, seed=1)
    lengths = [8, 16, 24, 33, 40, 5, 40, 12, 30]
    params = [DiffusionParams(**(REQUEST | {"gen_length": n, "block_length": min(8, n)})) for n in lengths]
    alone = [list(generate(llm, [prompt], p)[0].outputs[0].token_ids) for prompt, p in zip(asked, params, strict=True)]
    together = [list(output.outputs[0].token_ids) for output in generate(llm, asked, params)]
    assert together == alone
    assert_nothing_left(llm)


@pytest.mark.parametrize("cache_method", ["prefix", "dual", "sparse", "dkv", "freecache"])
def test_slots_that_hold_no_retained_token_are_never_read(engine, cache_method):
    llm = engine(cache_method)
    asked = prompts(5, seed=2)
    expected = responses(llm, asked)
    pages = runner_of(llm).pages
    pages.keys.fill_(torch.nan)
    pages.values.fill_(torch.nan)
    assert responses(llm, asked) == expected


def test_pages_are_held_for_retained_tokens_only(engine):
    from dllm_engine import DiffusionParams

    llm = engine("sparse", retention_ratio=0.25)
    scheduler = scheduler_of(llm)
    prompt, params = [1] * 88, DiffusionParams(gen_length=40, block_length=8, ignore_eos=True)
    llm.llm_engine.add_request("one", {"prompt_token_ids": prompt}, params)
    layers = len(runner_of(llm).model.layers)
    llm.llm_engine.step()
    assert scheduler.pages.num_reserved == layers * 4  # int(120 · 0.25) = 30 tokens
    assert scheduler.pages.num_allocated == 0  # the first step of a block is FULL
    llm.llm_engine.step()
    assert scheduler.pages.num_allocated == layers * 4
    llm.llm_engine.abort_request(["one"])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert_nothing_left(llm)


def test_a_growing_cache_takes_pages_block_by_block(engine):
    from dllm_engine import DiffusionParams

    llm = engine("prefix")
    layers = len(runner_of(llm).model.layers)
    llm.llm_engine.add_request(
        "one", {"prompt_token_ids": [1] * 16}, DiffusionParams(gen_length=24, block_length=8, ignore_eos=True)
    )
    held = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        held.append(scheduler_of(llm).pages.num_allocated // layers)
    assert held[:24] == [2] * 8 + [3] * 8 + [4] * 7 + [0]


def test_dkv_holds_the_canvas_from_the_first_step_on(engine):
    from dllm_engine import DiffusionParams

    llm = engine("dkv")
    layers = len(runner_of(llm).model.layers)
    llm.llm_engine.add_request(
        "one", {"prompt_token_ids": [1] * 17}, DiffusionParams(gen_length=24, block_length=8, ignore_eos=True)
    )
    held = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        held.append((scheduler_of(llm).pages.num_allocated, scheduler_of(llm).pages.num_reserved))
    assert held[:24] == [(layers * 6, layers * 6)] * 23 + [(0, 0)]  # 41 tokens in pages of 8


def test_a_request_may_retain_less_than_the_engine(engine):
    llm = engine("sparse", retention_ratio=0.5)
    (prompt,) = prompts(1, seed=3)
    from dllm_engine import DiffusionParams

    (output,) = generate(llm, [prompt], DiffusionParams(**REQUEST, retention_ratio=0.25))
    outside = len(prompt) + 32
    assert {len(layer) for block in output.outputs[0].diffusion.retained_positions for layer in block} == {
        int(outside * 0.25)
    }
    assert responses(engine("sparse", retention_ratio=0.25), [prompt]) == [list(output.outputs[0].token_ids)]


def test_the_prefix_scope_keeps_the_suffix_whole(engine):
    from dllm_engine import DiffusionParams

    llm = engine("sparse", retention_ratio=0.5, scope="prefix")
    (output,) = generate(llm, [[1 + i % 90 for i in range(50)]], DiffusionParams(**REQUEST))
    for block, layers in enumerate(output.outputs[0].diffusion.retained_positions):
        start = 50 + 8 * block
        for positions in layers:
            assert [p for p in positions if p >= start] == list(range(start + 8, 90))
            assert len([p for p in positions if p < start]) == start // 2


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"retention_ratio": 0.9}, "retention_ratio=0.9"),
        ({"retention_ratio": 1.5}, "retention_ratio=1.5"),
        ({"threshold": 0.0}, "threshold=0.0"),
        ({"threshold": 1.1}, "threshold=1.1"),
    ],
)
def test_what_a_request_cannot_have_is_named(engine, params, named):
    llm = engine("sparse", retention_ratio=0.5)
    with pytest.raises(ValueError, match=named):
        responses(llm, [[1, 2, 3]], **params)
    assert len(responses(llm, [[1, 2, 3]])[0]) == 40


@pytest.mark.parametrize("ratio", [0.0, 0.001])
def test_a_ratio_that_retains_nothing_leaves_the_block_to_itself(engine, ratio):
    llm = engine("sparse", retention_ratio=ratio)
    assert [len(tokens) for tokens in responses(llm, prompts(3, seed=6))] == [40] * 3
    assert_nothing_left(llm)


def test_lowering_retention_needs_a_method_that_evicts(engine):
    with pytest.raises(ValueError, match="'dual' evicts nothing"):
        responses(engine("dual"), [[1, 2, 3]], retention_ratio=0.5)


@pytest.mark.parametrize(
    ("cache_method", "options", "named"),
    [
        ("sparse", {"retention_ratio": 1.5}, "retention_ratio=1.5"),
        ("sparse", {"pool_kernel_size": 4}, "pool_kernel_size=4"),
        ("maskkv", {"pool_kernel_size": 2}, "pool_kernel_size=2"),
        ("sparse", {"update_delay": -1}, "update_delay=-1"),
        ("sparse", {"scope": "suffix"}, "scope='suffix'"),
        ("sparse", {"ratio": 0.5}, "'ratio'=0.5"),
        ("dual", {"retention_ratio": 0.5}, "'retention_ratio'=0.5"),
        ("dkv", {"refresh_interval": 0}, "refresh_interval=0"),
        ("freecache", {"include_suffix": "half"}, "include_suffix='half'"),
    ],
)
def test_cache_options_out_of_range_are_named(cache_method, options, named):
    from dllm_engine.options import EngineOptions

    with pytest.raises(ValueError, match=named):
        EngineOptions.parse({"cache_method": cache_method, "cache_options": options})


def test_the_papers_settings_have_a_name():
    from dllm_engine.options import EngineOptions

    paper = EngineOptions.parse({"cache_method": "sparse", "cache_options": "paper"}).cache
    assert (paper.retention_ratio, paper.pool_kernel_size, paper.update_delay) == (0.5, 3, 1)


def test_a_request_the_pool_can_never_hold_is_refused_with_the_numbers(engines, tiny_llada):
    from dllm_engine import DiffusionParams

    # The pool fits one request of max_model_len at the ratio, so a shorter canvas never hits this; shrink it by hand.
    llm = engines(tiny_llada, page_size=PAGE_SIZE, cache_method="dual", max_num_seqs=7)
    cache_config = llm.llm_engine.vllm_config.cache_config
    whole = cache_config.num_gpu_blocks
    cache_config.num_gpu_blocks = 5
    try:
        with pytest.raises(ValueError, match=r"needs \d+ pages .* the pool has 4"):
            generate(llm, [[1] * 100], DiffusionParams(**REQUEST))
    finally:
        cache_config.num_gpu_blocks = whole
    assert len(responses(llm, [[1] * 100])[0]) == 40


@pytest.mark.parametrize("cache_method", ["sparse", "dkv", "freecache"])
def test_aborting_in_any_state_leaks_no_page(engine, cache_method):
    from dllm_engine import DiffusionParams

    llm = engine(cache_method)
    draw = random.Random(4)
    asked = prompts(50, seed=5)
    for i, prompt in enumerate(asked):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, DiffusionParams(**REQUEST))
    waiting = list(range(50))
    draw.shuffle(waiting)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        if waiting and draw.random() < 0.7:
            llm.llm_engine.abort_request([str(waiting.pop())])
    assert_nothing_left(llm)


def test_reuse_requests_of_equal_shape_share_one_attention_call_per_layer(engine, monkeypatch):
    from dllm_engine import DiffusionParams

    llm = engine("dual")
    for i in range(6):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": [i + 1] * 40}, DiffusionParams(**REQUEST))
    llm.llm_engine.step()
    calls = []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs),
    )
    llm.llm_engine.step()
    monkeypatch.undo()
    assert len(calls) == len(runner_of(llm).model.layers)
    llm.llm_engine.abort_request([str(i) for i in range(6)])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
