"""Requests answered a few at a time on one engine, and what that costs."""

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.evaluation import runner as module
from dllm_engine.evaluation.runner import Answers, Cost, Runner, answered
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
    most, tokens, total = 0, {}, Cost()
    for index, output, cost in answered(llm, requests, at_once=2):
        most = max(most, len(scheduler_of(llm).states))
        tokens[index] = list(output.token_ids)
        total.add(cost)
    assert most <= 2
    assert [tokens[index] for index in range(4)] == [list(output.outputs[0].token_ids) for output in outputs]
    figures = [output.outputs[0].diffusion for output in outputs]
    assert (total.requests, total.tokens, total.tokens_unmasked) == (4, 32, 32)
    assert total.forward_passes == sum(figure.forward_passes for figure in figures)
    assert total.tokens_computed == sum(figure.tokens_computed for figure in figures)
    assert total.tokens_per_second == 32 / total.seconds
    # Two blocks each: the first ends before the second, and none takes longer than all of them.
    assert 0 < total.first_block_seconds < total.latency_seconds < 4 * total.seconds


def test_tokens_behind_the_end_do_not_count(llm, requests):
    tokens = generate(llm, PROMPTS[:1], requests[0][1])[0].outputs[0].token_ids
    params = DiffusionParams(gen_length=8, block_length=4, stop_token_ids=[tokens[2]])
    ((_, _, cost),) = answered(llm, [(PROMPTS[0], params)])
    assert cost.tokens == list(tokens).index(tokens[2])
    assert cost.tokens_unmasked == 4
    # Who stops asking leaves nothing behind.
    for _ in answered(llm, requests):
        break
    assert_nothing_left(llm)


def test_memory_is_weights_pages_and_what_a_step_works_with(llm, requests):
    total = Cost()
    for _, _, cost in answered(llm, requests[:2]):
        total.add(cost)
    outputs = generate(llm, PROMPTS[:2], [params for _, params in requests[:2]])
    pages_held = sum(output.outputs[0].diffusion.pages_held for output in outputs)
    assert total.page_bytes == pages_held * runner_of(llm).pages.memory[0].nbytes > 0
    assert total.weight_bytes > 0
    memory = (total.weight_bytes + total.page_bytes + total.working_bytes) / module.MIB
    assert total.figures["memory_mib"] == memory
    # Peaks, where the others are sums.
    most = total.page_bytes + 1
    total.add(Cost(requests=2, page_bytes=most))
    assert (total.requests, total.page_bytes) == (4, most)
    assert Cost(requests=1, tokens_unmasked=1, forward_passes=1).figures["memory_mib"] is None


def test_one_engine_runs_at_a_time_and_answered_requests_are_not_asked_again(llm, requests, monkeypatch):
    started, stopped = [], []
    monkeypatch.setattr(module, "stop_engine", stopped.append)
    runner = Runner(lambda arguments: started.append(arguments) or llm)
    answers, shares = Answers(texts={"1": "stored"}), []
    ask = lambda llm, answer: answer(llm, requests[:2]) + answer(llm, requests[2:])  # noqa: E731 - a line of a test
    texts = runner.run({"cache_method": "dual"}, ask, answers, tell=shares.append)
    assert texts[1] == "stored"
    assert len(answers.texts) == 4
    assert (answers.cost.requests, shares) == (3, [1.0, 0.5, 0.5])
    runner.run({"cache_method": "dual"}, ask, Answers())
    assert (len(started), stopped) == (1, [])
    with pytest.raises(RuntimeError):
        runner.run({"cache_method": "none"}, lambda llm, answer: (_ for _ in ()).throw(RuntimeError), Answers())
    assert (len(started), len(stopped)) == (2, 2), "one for the other engine, one because it failed"
