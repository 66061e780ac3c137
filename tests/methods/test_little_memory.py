"""Requests whose pages come as blocks come, in memory for few of them: preempted, they go on with the same tokens."""

import pytest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.stats import PrefixCacheStats

from dllm_engine import DiffusionParams
from dllm_engine.scheduler.page_pool import PagePool
from tests.methods.test_shared_prefixes import IN_PARTS, engine, requests_of
from tests.support.engines import assert_nothing_left, scheduler_of, set_steps_per_dispatch
from tests.support.stepped_engines import Poison, abort_all, run_in_steps

__all__ = ["engine"]


@pytest.fixture
def little_memory(monkeypatch):
    """``little_memory(llm, num_tokens)``: gives a running engine pages for so many tokens; returns a list of the
    requests that are preempted from then on."""

    def take(llm, num_tokens):
        scheduler, preempted = scheduler_of(llm), []
        size, shares = scheduler.geometry.page_size, scheduler.shares_prefixes
        num_pages = scheduler.geometry.num_layers * num_tokens // size + 1
        assert num_pages < scheduler.pages.num_pages
        monkeypatch.setattr(scheduler, "pages", PagePool(num_pages, size, shares=shares))
        preempt = scheduler._preempt

        def noting(request):
            preempted.append(request.request_id)
            preempt(request)

        monkeypatch.setattr(scheduler, "_preempt", noting)
        return preempted

    return take


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("parts", [{}, IN_PARTS], ids=["whole", "in parts"])
def test_tokens_are_those_of_plenty(engine, little_memory, parts, shares):
    """Greedy and sampled; nothing is read that has been given back."""
    prompts, params = requests_of(engine.block_length, 4, count=10)
    joins = [0, 0, 0, 1, 2, 3, 3, 9, 9, 12]
    plenty = run_in_steps(engine(enable_prefix_caching=False), prompts, params, joins=joins)
    llm = engine(enable_prefix_caching=shares, **parts)
    preempted = little_memory(llm, 168)
    # What others may still find is no leak.
    after_step = (lambda: None) if shares else Poison(llm)
    run = run_in_steps(llm, prompts, params, joins=joins, after_step=after_step)
    assert run.tokens == plenty.tokens
    assert len(preempted) >= 2
    assert any(plan.prefills for plans in run.plans for plan in plans) == bool(parts)
    for one, other in zip(run.figures, plenty.figures, strict=True):
        assert one.denoising_steps == other.denoising_steps
        assert one.tokens_unmasked == other.tokens_unmasked
        assert [step for step in one.unmasked_per_step if step] == [step for step in other.unmasked_per_step if step]


def test_aborts_leave_nothing_behind(engine, little_memory):
    prompts, params = requests_of(engine.block_length, 5, count=9)
    expected = run_in_steps(engine(enable_prefix_caching=False), prompts, params).tokens
    llm = engine()
    preempted = little_memory(llm, 168)
    for seed in (1, 2):
        abort_all(llm, prompts, params, seed=seed)
        assert run_in_steps(llm, prompts, params).tokens == expected
    assert preempted


def streamed(llm, prompts, params, granularity):
    """What the client of each request gets: its tokens, and the running blocks by step."""
    for i, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
        streaming = asked.clone()
        streaming.output_kind = RequestOutputKind.DELTA
        streaming.extra_args = asked.extra_args | {"stream_granularity": granularity}
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, streaming)
    tokens, blocks = [[] for _ in prompts], [[] for _ in prompts]
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens[int(output.request_id)] += output.outputs[0].token_ids
            if (running := getattr(output.outputs[0], "provisional", None)) is not None:
                blocks[int(output.request_id)].append((running.block, running.step, [*running.token_ids]))
    assert_nothing_left(llm)
    return tokens, blocks


@pytest.mark.parametrize("granularity", ["block", "step"])
def test_nothing_is_streamed_twice_or_lost(engine, little_memory, monkeypatch, granularity):
    prompts, params = requests_of(engine.block_length, 6, count=8)
    expected = streamed(engine(enable_prefix_caching=False), prompts, params, granularity)
    llm = engine()
    preempted = little_memory(llm, 168)
    set_steps_per_dispatch(llm, 4, monkeypatch)
    assert streamed(llm, prompts, params, granularity) == expected
    assert preempted
    assert any(expected[1]) == (granularity == "step")


def test_what_a_request_has_finished_is_found_again(engine):
    llm, scheduler = engine(), scheduler_of(engine())
    params = DiffusionParams(gen_length=64, block_length=engine.block_length, steps_per_block=1, ignore_eos=True)
    llm.llm_engine.add_request("a", {"prompt_token_ids": [*range(20)]}, params)
    state = None
    while state is None or state.progress.retained < 56:
        llm.llm_engine.step()
        (state,) = scheduler.states.values()
    kept = state.progress.retained
    scheduler._preempt(state.request)
    stats = scheduler.prefix_stats = PrefixCacheStats()
    llm.llm_engine.step()
    assert (stats.preempted_requests, stats.preempted_hits) == (1, kept // 8 * 8)
    llm.llm_engine.abort_request(["a"])
    assert_nothing_left(llm)
