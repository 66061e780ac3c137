"""Requests answered a few at a time on one engine, and what that costs."""

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.evaluation.runner import MIB, Cost, complete_requests
from tests.support.engines import (
    assert_nothing_left,
    generate,
    responses,
    runner_of,
    scheduler_of,
)

PROMPTS = [[5, 6, 7], [8, 9], [5] * 20, [7, 7]]


@pytest.fixture
def llm(engines, tiny_llada):
    return engines(tiny_llada, cache_method="dual")


@pytest.fixture
def requests():
    params = DiffusionParams(gen_length=8, block_length=4, ignore_eos=True)
    return [(prompt, params) for prompt in PROMPTS]


def test_a_few_at_a_time_cost_what_all_at_once_cost(llm, requests, monkeypatch):
    outputs = generate(llm, PROMPTS, [params for _, params in requests])
    step, running = llm.llm_engine.step, []
    monkeypatch.setattr(
        llm.llm_engine,
        "step",
        lambda: [running.append(len(scheduler_of(llm).states)), step()][1],
    )
    monkeypatch.setattr(llm.llm_engine.vllm_config.scheduler_config, "max_num_seqs", 2)
    completions, cost = complete_requests(llm, requests)
    assert max(running) <= 2
    assert [completion.text for completion in completions] == [
        output.outputs[0].text for output in outputs
    ]
    figures = [output.outputs[0].diffusion for output in outputs]
    assert (cost.requests, cost.tokens, cost.tokens_unmasked) == (4, 32, 32)
    assert cost.forward_passes == sum(figure.forward_passes for figure in figures)
    assert cost.tokens_computed == sum(figure.tokens_computed for figure in figures)
    assert cost.tokens_per_second == 32 / cost.seconds
    # Two blocks each: the first ends before the second, and none takes longer than all
    # of them.
    assert 0 < cost.first_block_seconds < cost.latency_seconds < 4 * cost.seconds
    page = runner_of(llm).rank.pages.memory[0].nbytes
    assert (
        0 < cost.page_bytes <= 2 * page * max(figure.pages_held for figure in figures)
    )
    assert cost.figures["pages_mib"] == cost.page_bytes / MIB
    assert cost.figures["memory_mib"] is None, "on a CPU"


def test_tokens_behind_the_end_do_not_count_and_nothing_is_left_of_a_failure(
    llm, requests, monkeypatch
):
    (tokens,) = responses(llm, PROMPTS[:1], requests[0][1])
    params = DiffusionParams(gen_length=8, block_length=4, stop_token_ids=[tokens[2]])
    _, cost = complete_requests(llm, [(PROMPTS[0], params)])
    assert cost.tokens == tokens.index(tokens[2])
    assert cost.tokens_unmasked == 4
    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            complete_requests(llm, requests)
    assert_nothing_left(llm)


def test_costs_are_sums_and_peaks():
    total = Cost(requests=1, page_bytes=5)
    total.add(Cost(requests=2, page_bytes=3, memory_bytes=7))
    assert (total.requests, total.page_bytes, total.memory_bytes) == (3, 5, 7)
    assert set(Cost().figures.values()) == {None}
