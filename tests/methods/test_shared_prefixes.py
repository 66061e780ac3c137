"""Requests that begin alike share pages, and are answered as if they did not, also
where prompts are fed in parts.
"""

import random
from typing import Any, cast
from unittest import mock

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.scheduler.page_pool import PagePool
from tests.support.engines import (
    assert_nothing_left,
    generate,
    scheduler_of,
    set_steps_per_dispatch,
)
from tests.support.stepped_engines import Poison, run_in_steps, streamed

MODELS = {"sdar-tiny-a": 4, "llada2-moe-tiny-a": 16}
"""And the block length of requests."""
IN_PARTS = {"max_num_batched_tokens": 48, "max_num_seqs": 16}


@pytest.fixture(params=MODELS)
def engine(request, engines, reference_checkpoints):
    def make(**settings):
        checkpoint = reference_checkpoints / request.param
        defaults = {
            "page_size": 8,
            "max_model_len": 160,
            "kv_cache_memory_bytes": 4 << 20,
        }
        llm = engines(checkpoint, **defaults | settings)
        llm.reset_prefix_cache()
        return llm

    cast(Any, make).block_length = MODELS[request.param]
    return make


def requests_of(block_length: int, seed: int, count: int = 6):
    """Prompts with one of three beginnings, and what is asked, greedy and sampled."""
    draw = random.Random(seed)

    def text(length):
        return [draw.randrange(480) for _ in range(length)]

    beginnings = [text(67), text(40), []]
    prompts = [beginnings[i % 3] + text(draw.randrange(1, 30)) for i in range(count)]
    rules: list[dict[str, Any]] = [
        {"threshold": 0.5},
        {"steps_per_block": 2},
        {"unmasking": "sequential"},
        {"entropy_budget": 2.0},
    ]
    asked: dict[str, Any] = {"block_length": block_length, "ignore_eos": True}
    params = [
        DiffusionParams(
            gen_length=draw.randrange(1, 40),
            temperature=i % 2,
            seed=i,
            **asked,
            **rules[i % 4],
        )
        for i in range(count)
    ]
    return prompts, params


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("cache_method", ["block", "focus"])
@pytest.mark.parametrize("settings", [{}, IN_PARTS], ids=["whole", "in parts"])
def test_tokens_are_the_same_with_and_without(engine, settings, cache_method):
    prompts, params = requests_of(engine.block_length, 1)
    settings = settings | {"cache_method": cache_method}
    plain = engine(enable_prefix_caching=False, cache_method=cache_method)
    expected = tokens(generate(plain, prompts, params))
    llm = engine(**settings)
    assert not any(
        output.num_cached_tokens for output in generate(plain, prompts, params)
    )
    first = generate(llm, prompts, params)
    assert tokens(first) == expected
    # Of each beginning, requests behind the first find its whole pages, as far as whole
    # blocks fill them.
    assert [output.num_cached_tokens for output in first[3:5]] == [
        64,
        32 if engine.block_length == 16 else 40,
    ]
    again = generate(llm, prompts, params)
    assert tokens(again) == expected
    assert all(
        len(prompt) - 24 < output.num_cached_tokens
        for prompt, output in zip(prompts, again, strict=True)
    )
    assert_nothing_left(llm)


@pytest.mark.parametrize("cache_method", ["block", "focus"])
def test_what_a_text_fills_of_its_last_page_is_copied(engine, cache_method):
    """For all requests of a step, and from pages that others are given in it."""
    draw = random.Random(9)
    text, *ends = (
        [draw.randrange(480) for _ in range(size)] for size in (93, *[9] * 12)
    )
    prompts = [text + end for end in ends]
    params = DiffusionParams(
        gen_length=12, block_length=engine.block_length, ignore_eos=True
    )
    plain = engine(enable_prefix_caching=False, cache_method=cache_method)
    llm = engine(page_size=32, cache_method=cache_method)
    expected = tokens(generate(plain, prompts, [params] * 12))
    outputs = generate(llm, prompts, [params] * 12)
    assert tokens(outputs) == expected
    copied = 93 - 93 % engine.block_length
    assert [each.num_cached_tokens for each in outputs] == [0] + 11 * [copied]
    assert_nothing_left(llm)


def test_a_prompt_that_is_aborted_half_fed_leaves_only_what_was_fed(engine):
    llm = engine(**IN_PARTS)
    params = DiffusionParams(gen_length=8, block_length=engine.block_length)
    prompt = [*range(10, 130)]
    llm.llm_engine.add_request("aborted", {"prompt_token_ids": prompt}, params)
    llm.llm_engine.step()
    llm.llm_engine.abort_request(["aborted"])
    (after,) = generate(llm, [prompt], params)
    assert 0 < cast(int, after.num_cached_tokens) <= IN_PARTS["max_num_batched_tokens"]
    (fresh,) = generate(engine(**IN_PARTS), [prompt], params)
    assert tokens([after]) == tokens([fresh])


def test_another_block_length_or_salt_shares_nothing(engine):
    llm, length = engine(), engine.block_length
    salted = {"cache_salt": "mine"}
    for block_length, more, shared in [
        (length, {}, 0),
        (2 * length, {}, 0),
        (length, salted, 0),
        (length, {}, 64),
    ]:
        params = DiffusionParams(
            gen_length=4, block_length=block_length, ignore_eos=True
        )
        (output,) = llm.generate(
            {"prompt_token_ids": list(range(64))} | more, params, use_tqdm=False
        )
        assert output.num_cached_tokens == shared


# In memory for few requests: those that are preempted go on with the same tokens


@pytest.fixture
def little_memory(monkeypatch):
    """``little_memory(llm, num_tokens)``: gives a running engine pages for so many
    tokens; returns a mock of what preempts its requests from then on."""

    def take(llm, num_tokens):
        scheduler = scheduler_of(llm)
        tables = scheduler.tables
        size = tables.geometry.page_size
        num_pages = tables.geometry.num_layers * num_tokens // size + 1
        assert num_pages < scheduler.pages.num_pages
        pages = PagePool(num_pages, size, shares=tables.pages.shares)
        monkeypatch.setattr(tables, "pages", pages)
        preempt = mock.Mock(wraps=scheduler._preempt)
        monkeypatch.setattr(scheduler, "_preempt", preempt)
        return preempt

    return take


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("parts", [{}, IN_PARTS], ids=["whole", "in parts"])
def test_tokens_are_those_of_plenty(engine, little_memory, parts, shares):
    """Greedy and sampled; nothing is read that has been given back."""
    prompts, params = requests_of(engine.block_length, 4, count=10)
    joins = [0, 0, 0, 1, 2, 3, 3, 9, 9, 12]
    plenty = run_in_steps(
        engine(enable_prefix_caching=False), prompts, params, joins=joins
    )
    llm = engine(enable_prefix_caching=shares, **parts)
    preempt = little_memory(llm, 168)
    # What others may still find is no leak.
    after_step = (lambda: None) if shares else Poison(llm)
    run = run_in_steps(llm, prompts, params, joins=joins, after_step=after_step)
    assert run.tokens == plenty.tokens
    assert preempt.call_count >= 2
    assert any(plan.quota.is_empty for plans in run.plans for plan in plans) == bool(
        parts
    )
    for one, other in zip(run.figures, plenty.figures, strict=True):
        assert one.denoising_steps == other.denoising_steps
        assert one.tokens_unmasked == other.tokens_unmasked
        assert [step for step in one.unmasked_per_step if step] == [
            step for step in other.unmasked_per_step if step
        ]


def received(llm, prompts, params):
    """What the client of each request gets: its tokens, and the running
    blocks by step.
    """
    tokens = [[] for _ in prompts]
    blocks = [[] for _ in prompts]
    for output in streamed(llm, prompts, params):
        tokens[int(output.request_id)] += output.outputs[0].token_ids
        if (running := getattr(output.outputs[0], "provisional", None)) is not None:
            blocks[int(output.request_id)].append(
                (running.block, running.step, [*running.token_ids])
            )
    return tokens, blocks


@pytest.mark.parametrize("granularity", ["block", "step"])
def test_nothing_is_streamed_twice_or_lost(
    engine, little_memory, monkeypatch, granularity
):
    prompts, params = requests_of(engine.block_length, 6, count=8)
    for asked in params:
        asked.stream_granularity = granularity
    expected = received(engine(enable_prefix_caching=False), prompts, params)
    llm = engine()
    preempt = little_memory(llm, 168)
    set_steps_per_dispatch(llm, 4, monkeypatch)
    assert received(llm, prompts, params) == expected
    assert preempt.called
    assert any(expected[1]) == (granularity == "step")
