"""Requests that begin alike share pages, and are answered as if they did not, also where prompts are fed in parts."""

import random

import pytest
from vllm.v1.metrics.stats import PrefixCacheStats

from dllm_engine import DiffusionParams
from tests.support.engines import assert_nothing_left, generate, scheduler_of
from tests.support.stepped_engines import run_in_steps

MODELS = {"sdar-tiny-a": 4, "llada2-moe-tiny-a": 16}
"""And the block length of requests."""
IN_PARTS = {"max_num_batched_tokens": 48, "max_num_seqs": 16}


@pytest.fixture(params=MODELS)
def engine(request, engines, reference_checkpoints):
    def make(**settings):
        checkpoint = reference_checkpoints / request.param
        defaults = {"page_size": 8, "max_model_len": 160, "kv_cache_memory_bytes": 4 << 20}
        llm = engines(checkpoint, **defaults | settings)
        llm.reset_prefix_cache()
        return llm

    make.block_length = MODELS[request.param]
    return make


def requests_of(block_length: int, seed: int, count: int = 9):
    """Prompts with one of three beginnings, and what is asked, greedy and sampled."""
    draw = random.Random(seed)

    def text(length):
        return [draw.randrange(480) for _ in range(length)]

    beginnings = [text(67), text(40), []]
    prompts = [beginnings[i % 3] + text(draw.randrange(1, 30)) for i in range(count)]
    rules = [{"threshold": 0.5}, {"steps_per_block": 2}, {"unmasking": "sequential"}, {"entropy_budget": 2.0}]
    asked = {"block_length": block_length, "ignore_eos": True}
    params = [
        DiffusionParams(gen_length=draw.randrange(1, 40), temperature=i % 2, seed=i, **asked, **rules[i % 4])
        for i in range(count)
    ]
    return prompts, params


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("settings", [{}, IN_PARTS], ids=["whole", "in parts"])
def test_tokens_are_the_same_with_and_without(engine, settings):
    prompts, params = requests_of(engine.block_length, 1)
    plain = engine(enable_prefix_caching=False)
    expected = tokens(generate(plain, prompts, params))
    llm = engine(**settings)
    assert not any(output.num_cached_tokens for output in generate(plain, prompts, params))
    first = generate(llm, prompts, params)
    assert tokens(first) == expected
    # Of each beginning, requests behind the first find its whole pages, as far as whole blocks fill them.
    assert [output.num_cached_tokens for output in first[3:5]] == [64, 32 if engine.block_length == 16 else 40]
    again = generate(llm, prompts, params)
    assert tokens(again) == expected
    assert all(len(prompt) - 24 < output.num_cached_tokens for prompt, output in zip(prompts, again, strict=True))
    assert_nothing_left(llm)


def test_an_engine_told_so_feeds_prompts_whole(engine):
    llm = engine(max_num_batched_tokens=200, enable_chunked_prefill=False)
    prompts, asked = [[number] * 120 for number in range(4)], {"gen_length": 4, "ignore_eos": True}
    run = run_in_steps(llm, prompts, [DiffusionParams(block_length=engine.block_length, **asked)] * 4)
    assert not any(plan.prefills for plans in run.plans for plan in plans)
    assert [len(plans) for plans in run.plans[:2]] == [1, 2]


def test_another_block_length_or_salt_shares_nothing(engine):
    llm = engine()
    prompt, length = list(range(64)), engine.block_length
    asked = {"gen_length": 4, "ignore_eos": True}
    first = generate(llm, [prompt], DiffusionParams(block_length=length, **asked))
    assert first[0].num_cached_tokens == 0
    (other,) = generate(llm, [prompt], DiffusionParams(block_length=2 * length, **asked))
    assert other.num_cached_tokens == 0
    salted = {"prompt_token_ids": prompt, "cache_salt": "mine"}
    (output,) = llm.generate(salted, DiffusionParams(block_length=length, **asked), use_tqdm=False)
    assert output.num_cached_tokens == 0
    (same,) = generate(llm, [prompt], DiffusionParams(block_length=length, **asked))
    assert same.num_cached_tokens == 64


def test_hits_are_in_vllms_statistics(engine):
    llm = engine()
    stats = scheduler_of(llm).prefix_stats = PrefixCacheStats()
    generate(llm, [list(range(40))] * 2, DiffusionParams(gen_length=4, ignore_eos=True, block_length=4))
    assert (stats.requests, stats.queries, stats.hits) == (2, 80, 40)
