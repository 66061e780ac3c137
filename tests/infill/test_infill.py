"""Filling in with the demo model, in Python and over HTTP."""

import json
import re
from functools import partial

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.evaluation.own_tasks import HOLES, OwnTasks, demo_tasks
from dllm_engine.evaluation.runner import Answers, Runner
from tests.support.engines import assert_nothing_left

PROMPT = "User: Tom=48. Ida=07. Max=31. Give: Tom, Ida, Max\nBot:"
BEFORE, WANTED, AFTER = " Tom=48,", " Ida=07", ", Max=31"


@pytest.fixture
def complete(client):
    return lambda **fields: client.post("/v1/completions", json={"model": "demo", "prompt": PROMPT + BEFORE} | fields)


def test_what_belongs_between_two_texts(demo):
    (output,) = demo.infill(PROMPT + BEFORE, AFTER, DiffusionParams(gen_length=4))
    (completion,) = output.outputs
    assert (completion.text, completion.holes, completion.joined) == (WANTED, [WANTED], WANTED + AFTER)
    assert len(completion.token_ids) == completion.diffusion.tokens_unmasked == 4
    assert completion.finish_reason == "length"
    assert_nothing_left(demo)


def test_several_holes_and_several_prompts(demo):
    templates = [[" Tom=", 2, ", Ida=", 2, ", Max=31"], [4, ", Ida=07", ", ", 4]]
    first, second = demo.fill_in([[{"role": "user", "content": PROMPT[6:-5]}]] * 2, templates)
    assert first.outputs[0].holes == ["48", "07"]
    assert first.outputs[0].joined == BEFORE + WANTED + AFTER
    assert second.outputs[0].holes[0] == " Tom=48"


def test_of_several_sizes_the_surest_is_kept(demo):
    sizes = (2, 4, 5)
    (kept,) = demo.infill(PROMPT + BEFORE, AFTER, sizes=sizes)
    alone = [demo.infill(PROMPT + BEFORE, AFTER, DiffusionParams(gen_length=n, logprobs=0))[0] for n in sizes]
    means = [output.outputs[0].cumulative_logprob / n for output, n in zip(alone, sizes, strict=True)]
    assert kept.outputs[0].token_ids == alone[means.index(max(means))].outputs[0].token_ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": DiffusionParams()}, "give one of them"),
        ({"params": DiffusionParams(gen_length=4), "sizes": [2]}, "give one of them"),
        ({"sizes": [0]}, "a hole has 1"),
        ({"sizes": [2, 3], "params": DiffusionParams(n=2, temperature=1.0)}, "n=2"),
        ({"suffix": [AFTER, AFTER], "sizes": [2]}, "1 prefixes and 2 suffixes"),
    ],
)
def test_what_cannot_be_filled_in_is_refused(demo, arguments, message):
    with pytest.raises(ValueError, match=message):
        demo.infill(**{"prefix": PROMPT, "suffix": AFTER} | arguments)


def test_samples_differ(demo):
    params = DiffusionParams(gen_length=12, n=3, temperature=2.0, seed=1)
    (output,) = demo.infill("Tom", "Ida", params)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


# HTTP


def test_suffix_of_a_completion(complete):
    answer = complete(suffix=AFTER, max_tokens=4).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["holes"], answer["usage"]["completion_tokens"]) == (WANTED, [WANTED], 4)
    assert complete(suffix=AFTER).json()["usage"]["completion_tokens"] == 16
    lines = complete(suffix=AFTER, max_tokens=4, stream=True).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == WANTED


def test_templates_over_http(client, complete):
    template = [" Tom=", 2, ", Ida=", 2, ", Max=31"]
    chat = {"messages": [{"role": "user", "content": PROMPT[6:-5]}], "vllm_xargs": {"template": template}}
    answer = client.post("/v1/chat/completions", json={"model": "demo"} | chat)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["holes"] == ["48", "07"]
    assert choice["message"]["content"] == BEFORE + WANTED + AFTER
    holes = {"template": [WANTED, ", ", 4], "return_given": False}
    (choice,) = complete(vllm_xargs=holes).json()["choices"]
    assert choice["text"] == choice["holes"][0]
    tokens = complete(vllm_xargs={"response_template": "[null, 5, null]"}, return_token_ids=True).json()
    assert tokens["choices"][0]["token_ids"][1] == 5, tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suffix": AFTER, "echo": True}, "suffix is not supported with echo"),
        ({"suffix": AFTER, "vllm_xargs": {"template": [1, "a"]}}, "suffix and a template"),
        ({"suffix": "<|endoftext|>"}, "special token"),
        ({"suffix": AFTER * 400, "max_tokens": 4}, "max_model_len"),
        ({"suffix": AFTER, "max_tokens": 0}, "max_tokens"),
        ({"vllm_xargs": {"template": ["a"]}}, "no hole"),
        ({"vllm_xargs": {"template": "a"}}, "template is a str, not a list"),
        ({"vllm_xargs": {"template": [1, "a"], "response_template": "[null]"}}, "give one"),
        ({"vllm_xargs": {"template": [4, "a"]}, "max_tokens": 4}, "gen_length .max_tokens. is 4"),
        ({"vllm_xargs": {"response_template": "[1, 2]"}}, "nothing to fill in"),
        ({"vllm_xargs": {"response_template": "[null, "}}, "response_template"),
        ({"vllm_xargs": {"response_template": "[null, 600]"}}, "outside the vocabulary"),
        ({"vllm_xargs": {"response_template": "[null, 2]"}}, "mask token"),
        ({"vllm_xargs": {"response_template": "[null, 1, 5]"}}, "an end token"),
        ({"vllm_xargs": {"return_given": False}}, "nothing is given"),
    ],
)
def test_bad_requests_are_answered_with_400(complete, demo, fields, message):
    answer = complete(**fields)
    assert answer.status_code == 400, answer.text
    assert re.search(message, answer.json()["error"]["message"]), answer.text
    assert_nothing_left(demo)
    assert complete(suffix=AFTER, max_tokens=4).json()["choices"][0]["text"] == WANTED


def test_the_demo_model_fills_in_items_of_its_answers(demo):
    """By the training that it has, which masks any part of an answer."""
    tasks = demo_tasks(HOLES, 4, seed=0)
    assert {task.part for task in tasks} == {"names", "keys", "facts", "reverse", "copy"}
    assert all(any(task.given) for task in tasks)
    score = partial(OwnTasks(HOLES, tasks, "exact").score, decoding={"gen_length": 64, "block_length": 64})
    result = Runner(lambda arguments: demo).run({}, score, Answers(), at_once=32)
    assert result.score >= 0.95, result.details
