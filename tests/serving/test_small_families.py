"""Every family over the routes of editors; the families of smaller models, and
Nemotron's, over every other route; in this process.
"""

from typing import Any

import pytest

from tests.support import tiny_checkpoints
from tests.support.byte_level_tokenizers import TALE, train_tokenizer
from tests.support.http_app import choices_of, served

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
    short = {"max_tokens": 8, "vllm_xargs": FAMILIES[name]}
    chat = {"messages": CHAT, **short, "logprobs": True}
    ask(client, "/v1/completions", prompt="There once", **short)
    whole, streamed = (
        ask(client, "/v1/chat/completions", stream=stream, **chat)
        for stream in (False, True)
    )
    assert choices_of(streamed) == choices_of(whole)
    ask(client, "/v1/responses", input="There once was", max_output_tokens=8)
    ask(client, "/v1/messages", messages=CHAT, max_tokens=8)
    ask(client, "/tokenize", messages=CHAT)
    tokens = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}}
    ask(client, "/inference/v1/generate", **tokens)


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
