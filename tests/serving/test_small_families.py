"""Every family over the routes of decisions and editors; the families of smaller models,
and Nemotron's, over every other route and with what routes take; in this process.
"""

import json
from typing import Any

import pytest

from dllm_engine import Questions
from tests.support import tiny_checkpoints
from tests.support.byte_level_tokenizers import TALE, train_tokenizer
from tests.support.http_app import served
from tests.support.random_decisions import listed

FAMILIES = {
    "a2d": {},
    "a2d_bd3lm": {},
    "open_dcoder": {},
    "fast_dllm_v2": {},
    "nemotron_labs": {},
    "nemotron_labs, autoregressive": {"decoding": "autoregressive"},
    "nemotron_labs, self-speculation": {"decoding": "self_speculation"},
}
"""Checkpoints, and request options."""
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}Hush.{% endif %}"
)
CHAT = [{"role": "user", "content": "There once was"}]
REGION = "<|code_to_edit|>There<|cursor|><|/code_to_edit|>was"
EDITORS = {
    "/v1/completions": {"prompt": "There", "suffix": "was", "max_tokens": 4},
    "/v1/fim/completions": {"prompt": "There", "suffix": "was", "max_tokens": 4},
    "/infill": {"input_prefix": "There", "input_suffix": "was", "n_predict": 4},
    "/completion": {
        "prompt": "<fim_prefix>There<fim_suffix>was<fim_middle>",
        "n_predict": 4,
    },
    "/api/generate": {
        "prompt": "There",
        "suffix": "was",
        "stream": False,
        "options": {"num_predict": 4},
    },
    "/v1/edit/completions": {
        "messages": [{"role": "user", "content": REGION}],
        "max_tokens": 4,
    },
}
"""Bodies of a completion at a cursor, by route."""
AT_THE_END = {
    "/completion": {"prompt": "There once", "n_predict": 4},
    "/api/generate": {
        "prompt": "There once",
        "stream": False,
        "options": {"num_predict": 4},
    },
}
"""Bodies without text behind the cursor, and of a model's other completions."""
APPLICATION = "<code>\nonce\ntale\n</code>\n<update>\nonce\ntwice\ntale\n</update>"
CHOICE = {
    "type": "choice",
    "instructions": "Which word is there?",
    "choices": [{"value": "once"}, {"value": "tale"}],
}
PREDICATE = {"type": "predicate", "instructions": "There was a tale."}
NOUL = {"type": "noul", "instructions": "There was a tale."}
DIGITS = {"structured_outputs": {"regex": "[0-9]{3}"}}


@pytest.fixture(scope="module")
def small(engines, tmp_path_factory):
    """``small(name)``: an engine of a family, and a client of its server."""

    def start(name):
        family = name.partition(",")[0]
        folder = tmp_path_factory.getbasetemp() / f"small-{family}"
        if not folder.exists():
            tokenizer = train_tokenizer(TALE, 400, "<|end|>")
            tokenizer.chat_template = TEMPLATE
            size = "embedding_size" if family == "llada" else "vocab_size"
            sizes: dict[str, Any] = {size: 420}
            tiny_checkpoints.write(family, folder, **sizes)
            tokenizer.save_pretrained(folder)
        llm = engines(folder, skip_tokenizer_init=False)
        return llm, served(llm, "--served-model-name", "m", "--enable-scale-out")

    return start


def ask(client, route, **body):
    answer = client.post(route, json={"model": "m", **body})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("name", FAMILIES)
def test_every_route_answers(small, name):
    _, client = small(name)
    options = {"vllm_xargs": FAMILIES[name], "max_tokens": 8}

    text = ask(client, "/v1/completions", prompt="There once", **options)
    chat = ask(client, "/v1/chat/completions", messages=CHAT, logprobs=True, **options)
    (choice,) = chat.json()["choices"]
    stream = ask(
        client, "/v1/chat/completions", messages=CHAT, stream=True, **options
    ).text
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in stream.splitlines()
        if line.startswith("data: {")
    ]
    streamed = "".join(
        chunk["choices"][0]["delta"].get("content") or ""
        for chunk in chunks
        if chunk["choices"]
    )

    assert text.json()["usage"]["completion_tokens"] <= 8
    assert (
        len(choice["logprobs"]["content"]) == chat.json()["usage"]["completion_tokens"]
    )
    assert streamed == choice["message"]["content"]
    ask(client, "/v1/responses", input="There once was", max_output_tokens=8)
    ask(client, "/v1/messages", messages=CHAT, max_tokens=8)
    ask(client, "/tokenize", messages=CHAT)
    ask(
        client,
        "/inference/v1/generate",
        token_ids=[5, 6],
        sampling_params={"max_tokens": 4},
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_structured_output(small, name):
    _, client = small(name)
    body = {"model": "m", "messages": CHAT, "max_tokens": 8, **DIGITS}
    answer = client.post(
        "/v1/chat/completions", json=body | {"vllm_xargs": FAMILIES[name]}
    )
    if "speculation" in name:
        assert answer.status_code == 400
        assert "decoding='self_speculation'" in answer.text
    else:
        content = answer.json()["choices"][0]["message"]["content"]
        assert len(content) == 3
        assert content.isdecimal()


def text_of(answer):
    """The text in the answer of an editor's route, by its own form."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "choices" not in body:
        return body["content"] if "content" in body else body["response"]
    (choice,) = body["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("name", tiny_checkpoints.CONFIGS)
def test_filling_in_where_attention_reaches_what_follows(small, name):
    llm, client = small(name)
    answers = {
        route: client.post(route, json={"model": "m", **body})
        for route, body in EDITORS.items()
    }
    if llm.model_config.hf_config.family.attention == "full":
        edit = text_of(answers.pop("/v1/edit/completions"))
        texts = {text_of(answer) for answer in answers.values()}
        assert len(texts) == 1
        line = texts.pop().partition("\n")[0]
        assert edit == (f"```\nThere{line}\n```" if line.strip() else "None")
        return
    for route, answer in answers.items():
        assert answer.status_code == 400, route
        error = answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert "cannot fill in before a suffix" in message


@pytest.mark.parametrize("name", tiny_checkpoints.CONFIGS)
def test_editors_of_every_family_write_on_and_apply(small, name):
    _, client = small(name)
    asked = {"prompt": "There once", "max_tokens": 4}
    completion = ask(client, "/v1/completions", **asked)
    at_the_end = ask(client, "/v1/completions", suffix="\n", **asked)
    assert text_of(at_the_end) == text_of(completion)
    for route, body in AT_THE_END.items():
        assert text_of(ask(client, route, **body)) == text_of(completion)
    chat = [{"role": "user", "content": APPLICATION}]
    applied = ask(client, "/v1/apply/completions", messages=chat)
    assert text_of(applied) == "once\ntwice\ntale"


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", tiny_checkpoints.CONFIGS)
def test_decisions_are_those_of_python_or_refused(small, name, joint):
    llm, client = small(name)
    family = llm.model_config.hf_config.family
    text = "There once was a tale."
    asked = {"input": text, "questions": [CHOICE, PREDICATE], "joint": joint}
    word = {"type": "object", "properties": {"word": {"enum": ["tale", "once"]}}}
    answers = [
        client.post("/v1/decisions", json={"model": "m", **asked}),
        client.post(
            "/v1/systemone",
            json={"model": "m", "state": text, "questions": {"has": NOUL}},
        ),
        client.post(
            "/v1/decisions", json={"model": "m", "prompt": text, "fields": word}
        ),
    ]
    if family.seeds_blocks:
        for answer in answers:
            assert answer.status_code in (400, 422), answer.text
            assert f"decisions of {family.name} are not supported" in answer.text
        return
    assert [answer.status_code for answer in answers] == [200] * 3, answers[2].text
    (own,) = llm.decide(text, Questions([CHOICE, PREDICATE], joint))
    choice, predicate = answers[0].json()["answers"]
    shares = [each["probability"] for each in choice["probabilities"]]
    assert shares == pytest.approx([*own[0].probabilities], abs=1e-4)
    assert predicate["probability"] == pytest.approx(own[1].probabilities[0], abs=1e-4)
    noul = answers[1].json()["answers"]["has"]["noul"]
    assert joint or noul == pytest.approx(predicate["probability"], abs=1e-4)
    (decision,) = llm.decide(text, {"word": ["tale", "once"]})
    read = {
        each["value"]: each["probability"] for each in decision.distributions["word"]
    }
    assert listed(answers[2].json()["fields"]["word"]) == pytest.approx(read, abs=1e-4)


@pytest.mark.parametrize("name", ["a2d", "a2d_bd3lm", "nemotron_labs"])
def test_templates_get_the_arguments_of_the_authors_code(small, name):
    """Both of LLM and over HTTP: a2d does not think unless it is asked to."""
    llm, client = small(name)
    tokenizer = llm.get_tokenizer()

    def prompts(thinking):
        fields = {} if thinking is None else {"enable_thinking": thinking}
        rendered = llm.chat(CHAT, chat_template_kwargs=fields, use_tqdm=False)[
            0
        ].prompt_token_ids
        body = {"messages": CHAT, "chat_template_kwargs": fields}
        served_tokens = ask(client, "/tokenize", **body).json()["tokens"]
        return {tokenizer.decode(tokens) for tokens in (rendered, served_tokens)}

    hushed = {"There once wasHush."}
    assert prompts(None) == (hushed if "a2d" in name else {"There once was"})
    assert prompts(True) == {"There once was"}
    assert prompts(False) == hushed
