"""Responses whose length is chosen before they are decoded, in Python and over HTTP."""

import random
import re
from typing import Any

import pytest
from vllm import SamplingParams

from dllm_engine import DiffusionParams
from dllm_engine.demo import DEMO_MODEL_DIR
from dllm_engine.demo.tasks import TASKS, make_examples
from dllm_engine.request_options.layout import LengthRule
from tests.oracles.models import PlainModel
from tests.oracles.response_length import plain_length
from tests.support.engines import assert_nothing_left, generate, tokens_of
from tests.support.http_app import chunks_of, length_of, refusal, served

CHAT = [{"role": "user", "content": "Tom=48. Ida=07. Max=31. Give: Ida, Max"}]
ANSWER = "Ida=07, Max=31"
SHORT: dict[str, Any] = {"auto_length_start": 8, "auto_length_tail": 4}


@pytest.fixture(scope="module")
def by_default(engines):
    """An engine that chooses lengths unless a request names one."""
    return engines(
        "demo", skip_tokenizer_init=False, request_defaults={"auto_length": True}
    )


@pytest.mark.parametrize(
    ("length", "growth", "most", "following"),
    [
        (64, 2.0, 2048, 128),
        (64, 1.0, 2048, 72),
        (64, 2.0, 100, 100),
        (10, 1.0, 2048, 18),
        (20, 1.5, 2048, 32),
        (40, 1.1, 2048, 48),
    ],
)
def test_lengths_grow(length, growth, most, following):
    assert LengthRule(growth=growth).next_length(length, most) == following


def drawn_rules(seed: int, count: int, **fixed: Any) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {
            "start": draw.choice([4, 8, 16, 24]),
            "tail": draw.choice([2, 4, 8, 16]),
            "threshold": draw.choice([0.3, 0.5, 0.9]),
            "growth": draw.choice([1.0, 1.5, 2.0]),
            **{name: draw.choice(values) for name, values in fixed.items()},
        }
        for _ in range(count)
    ]


def params_of(rule: dict[str, Any], most: int, **others: Any) -> DiffusionParams:
    options = {f"auto_length_{name}": value for name, value in rule.items()}
    return DiffusionParams(gen_length="auto", max_tokens=most, **options, **others)


def test_lengths_and_tokens_are_daedals_alone_and_in_a_batch(demo):
    model, tokenizer = PlainModel(DEMO_MODEL_DIR), demo.get_tokenizer()
    draw = random.Random(0)
    examples = [each for task in TASKS for each in make_examples(task, 3, 5)]
    prompts = [
        tokenizer.encode(f"User: {each.prompt}\nBot:")[-150:] for each in examples
    ]
    rules = drawn_rules(1, len(prompts))
    limits = [draw.choice([4, 20, 50, 100]) for _ in prompts]
    asked = [params_of(*each) for each in zip(rules, limits, strict=True)]
    batch = [output.outputs[0] for output in generate(demo, prompts, asked)]
    wanted = [
        plain_length(model, prompt, limit, **rule)
        for prompt, limit, rule in zip(prompts, limits, rules, strict=True)
    ]
    assert len({length for length, _ in wanted}) > 6
    for prompt, params, (length, passes), completion in zip(
        prompts, asked, wanted, batch, strict=True
    ):
        figures = completion.diffusion
        assert figures.length_passes == passes
        assert (figures.length_rows > 0) == (passes > 0)
        fixed = tokens_of(demo, prompt, gen_length=length)
        assert list(completion.token_ids) == fixed
        (alone,) = generate(demo, [prompt], params)
        assert list(alone.outputs[0].token_ids) == fixed
    assert_nothing_left(demo)


@pytest.mark.parametrize("name", ["tiny_llada", "tiny_dream"])
def test_lengths_of_random_models(engines, request, name):
    folder = request.getfixturevalue(name)
    llm, model = engines(folder), PlainModel(folder)
    draw = random.Random(2)
    prompts = [
        [draw.randrange(5, 140) for _ in range(draw.randrange(1, 60))] for _ in range(6)
    ]
    rules = drawn_rules(3, 6, tail=[1, 2], threshold=[0.005, 0.01, 0.02])
    asked = [params_of(rule, 60, block_length=8) for rule in rules]
    outputs = generate(llm, prompts, asked)
    wanted = [
        plain_length(model, prompt, 60, **{**rule, "start": max(rule["start"], 8)})
        for prompt, rule in zip(prompts, rules, strict=True)
    ]
    assert [output.outputs[0].diffusion.length_passes for output in outputs] == [
        passes for _, passes in wanted
    ]
    for prompt, (length, _), output in zip(prompts, wanted, outputs, strict=True):
        fixed = tokens_of(llm, prompt, gen_length=length, block_length=8)
        assert list(output.outputs[0].token_ids) == fixed


def test_a_limit_is_no_length(demo):
    for most in (16, 100, 10**6, None):
        params = DiffusionParams(gen_length="auto", max_tokens=most, **SHORT)
        (output,) = demo.chat([CHAT], params, use_tqdm=False)
        assert output.outputs[0].text.strip() == ANSWER
    # What else is asked for needs more tokens than the choice begins with.
    needy = DiffusionParams(gen_length="auto", min_tokens=40, block_length=20, **SHORT)
    (output,) = demo.chat([CHAT], needy, use_tqdm=False)
    assert len(output.outputs[0].token_ids) >= 40


def test_several_responses_have_one_length(demo):
    params = DiffusionParams(gen_length="auto", n=3, temperature=0.5, seed=1, **SHORT)
    (output,) = demo.chat([CHAT], params, use_tqdm=False)
    assert {each.diffusion.length_passes for each in output.outputs} == {2}
    length = DiffusionParams(gen_length=16, n=3, temperature=0.5, seed=1)
    (fixed,) = demo.chat([CHAT], length, use_tqdm=False)
    assert [each.token_ids for each in output.outputs] == [
        each.token_ids for each in fixed.outputs
    ]


def test_a_default_of_the_engine_is_for_requests_that_name_a_limit_only(by_default):
    def passes(params: Any) -> int:
        (output,) = by_default.chat([CHAT], params, use_tqdm=False)
        return output.outputs[0].diffusion.length_passes

    assert passes(DiffusionParams(max_tokens=100)) == 1
    assert passes(SamplingParams(max_tokens=100, temperature=0)) == 1
    assert passes(DiffusionParams()) == 1
    assert passes(DiffusionParams(gen_length=100)) == 0
    assert passes(DiffusionParams(max_tokens=100, ignore_eos=True)) == 0
    assert passes(DiffusionParams(max_tokens=100, auto_length=False)) == 0
    (output,) = by_default.infill("User: Tom=48. Ida=07. Give: Ida\nBot:", "=07")
    assert output.outputs[0].diffusion.length_passes == 0


ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": (
        {"prompt": f"User: {CHAT[0]['content']}\nBot:"},
        "max_tokens",
    ),
    "/v1/chat/completions": ({"messages": CHAT}, "max_completion_tokens"),
    "/v1/responses": ({"input": CHAT}, "max_output_tokens"),
    "/v1/messages": ({"messages": CHAT}, "max_tokens"),
}


@pytest.mark.parametrize("path", ROUTES)
def test_over_http(client, by_default, path):
    body, name = ROUTES[path]
    body = {"model": "demo", name: 400, **body}
    answers = [served(by_default, "--served-model-name", "demo").post(path, json=body)]
    if path != "/v1/messages":  # which has no place for options
        xargs = {"auto_length": True, **SHORT}
        answers.append(client.post(path, json={**body, "vllm_xargs": xargs}))
    for answer in answers:
        assert ANSWER in answer.text
        assert length_of(answer) < 16


def test_figures_over_http_tell_the_passes(client):
    body = {"model": "demo", "max_tokens": 100, **ROUTES["/v1/completions"][0]}
    body["vllm_xargs"] = {"auto_length": True, **SHORT}
    whole = client.post("/v1/completions", json=body).json()
    (choice,) = whole["choices"]
    assert choice["diffusion"]["length_passes"] == 2
    chunks = chunks_of(client.post("/v1/completions", json={**body, "stream": True}))
    streamed = "".join(x["text"] for chunk in chunks for x in chunk["choices"])
    assert streamed == choice["text"]


def test_a_text_that_must_match_gets_room(client):
    body = {"model": "demo", "max_tokens": 100, **ROUTES["/v1/completions"][0]}
    body["vllm_xargs"] = {"auto_length": True, **SHORT}
    regex = " Ida=[0-9]{2}, Max=[0-9]{2}(, Tom=[0-9]{2}){4}"
    body["structured_outputs"] = {"regex": regex}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert re.fullmatch(regex, choice["text"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ignore_eos": True}, "ignore_eos=True"),
        ({"vllm_xargs": {"auto_length": True, "template": [1, "a"]}}, "a template has"),
        ({"vllm_xargs": {"auto_length_start": 8}}, "length .* is not chosen"),
        ({"vllm_xargs": {"auto_length": True, "auto_length_growth": 0.5}}, "growth"),
        ({"vllm_xargs": {"gen_length": "auto"}}, "auto_length in vllm_xargs"),
        ({"min_tokens": 50, "max_tokens": 8}, "min_tokens"),
        ({"prompt": [5] * 2000}, "maximum context length"),
    ],
)
def test_what_cannot_be_chosen_is_refused(client, demo, fields, message):
    body = {"prompt": "a", "vllm_xargs": {"auto_length": True}, **fields}
    answer = client.post("/v1/completions", json={"model": "demo", **body})
    assert re.search(message, refusal(answer))
    assert_nothing_left(demo)


def test_block_models_refuse(engines):
    llm = engines("demo-blocks", skip_tokenizer_init=False)
    with pytest.raises(ValueError, match="does not see how many masks"):
        llm.chat([CHAT], DiffusionParams(gen_length="auto"), use_tqdm=False)


def test_the_engine_below_does_not_choose(demo):
    params = DiffusionParams(gen_length="auto").to_sampling_params()
    with pytest.raises(ValueError, match=r"chosen by LLM"):
        demo.llm_engine.add_request("1", "a", params)
    with pytest.raises(ValueError, match="say different things"):
        DiffusionParams(gen_length="auto", auto_length=False)
