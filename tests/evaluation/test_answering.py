"""Requests answered a few at a time, and what that costs."""

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.bench.memory import MemoryMeter
from dllm_engine.evaluation.answering import Cost, Memory, answer_all, answers
from tests.support.engines import assert_nothing_left, generate, runner_of, scheduler_of

PROMPTS = [[5, 6, 7], [8, 9], [5] * 20, [7, 7]]


@pytest.fixture
def llm(engines, tiny_llada):
    return engines(tiny_llada, cache_method="dual")


@pytest.fixture
def requests():
    params = DiffusionParams(gen_length=8, block_length=4, ignore_eos=True)
    return [(prompt, params) for prompt in PROMPTS]


def test_a_few_at_a_time_cost_what_all_at_once_cost(llm, requests):
    outputs = generate(llm, PROMPTS, [params for _, params in requests])
    most, found = 0, {}
    total = Cost()
    for index, output, cost in answers(llm, requests, at_once=2):
        most = max(most, len(scheduler_of(llm).states))
        found[index] = list(output.outputs[0].token_ids)
        total.add(cost)
    assert most <= 2
    assert [found[index] for index in range(4)] == [list(output.outputs[0].token_ids) for output in outputs]
    figures = [output.outputs[0].diffusion for output in outputs]
    assert (total.requests, total.tokens, total.tokens_unmasked) == (4, 32, 32)
    assert total.forward_passes == sum(figure.forward_passes for figure in figures)
    assert total.tokens_computed == sum(figure.tokens_computed for figure in figures)
    assert total.tokens_per_second == 32 / total.seconds
    assert answer_all(llm, requests, at_once=4)[1].requests == 4


def test_tokens_behind_the_end_do_not_count(llm, requests):
    tokens = generate(llm, PROMPTS[:1], requests[0][1])[0].outputs[0].token_ids
    params = DiffusionParams(gen_length=8, block_length=4, stop_token_ids=[tokens[2]])
    ((_, _, cost),) = answers(llm, [(PROMPTS[0], params)], at_once=1)
    assert cost.tokens == list(tokens).index(tokens[2])
    assert cost.tokens_unmasked == 4
    # Who stops asking leaves nothing behind.
    for _ in answers(llm, requests, at_once=4):
        break
    assert_nothing_left(llm)


def test_memory_is_weights_pages_and_what_a_step_works_with(llm, requests):
    meter = MemoryMeter(llm)
    for _ in answers(llm, requests[:2], 2, meter):
        pass
    memory = meter.read()
    outputs = generate(llm, PROMPTS[:2], [params for _, params in requests[:2]])
    pages_held = sum(output.outputs[0].diffusion.pages_held for output in outputs)
    assert memory.page_bytes == pages_held * runner_of(llm).pages.memory[0].nbytes > 0
    assert memory.peak_bytes == memory.weight_bytes + memory.page_bytes + memory.working_bytes
    assert memory.max(Memory(0, memory.page_bytes + 1, 0, 0)).page_bytes == memory.page_bytes + 1
