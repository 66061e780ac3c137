"""Completions at a cursor on ``/v1/completions``, as editors ask for them."""

import pytest

from dllm_engine.editors.completions import fitted, plain_tokens
from tests.support.engines import assert_nothing_left
from tests.support.http_app import chunks_of, refusal, served

PREFIX = "User: Tom=48. Ida=07. Max=31. Give: Tom, Ida, Max\nBot: Tom=48,"
WANTED, SUFFIX = " Ida=07", ", Max=31"
MARKED = f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>"


@pytest.fixture
def complete(client):
    def ask(**fields):
        return client.post("/v1/completions", json={"model": "demo"} | fields)

    return ask


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": PREFIX, "suffix": SUFFIX},
        {"prompt": MARKED, "max_tokens": 4096, "temperature": 0.01},
        {"prompt": MARKED, "max_tokens": -1},
        {"prompt": MARKED, "stop": [f"stop {i}" for i in range(64)]},
        {"prompt": PREFIX, "suffix": SUFFIX, "presence_penalty": 1.5},
    ],
)
def test_what_belongs_at_the_cursor(complete, demo, fields):
    answer = complete(**fields)
    assert text_of(answer) == WANTED
    ignored = "presence_penalty" if "presence_penalty" in fields else None
    assert answer.headers.get("x-dllm-ignored") == ignored
    assert "x-dllm-cut" not in answer.headers
    chunks = chunks_of(complete(**fields, stream=True))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == WANTED
    assert choices[-1]["finish_reason"] == "stop"
    assert_nothing_left(demo)


def test_penalties_are_refused_where_nothing_is_filled_in(complete):
    assert "presence_penalty" in refusal(complete(prompt=PREFIX, presence_penalty=1.5))


@pytest.mark.parametrize(
    "fields",
    [{"suffix": SUFFIX}, {"vllm_xargs": {"template": ["a", -1]}}],
    ids=["suffix", "template"],
)
def test_no_prompt_is_refused(complete, fields):
    assert refusal(complete(prompt=[], n=2, temperature=1, **fields))


def test_a_stop_string_ends_the_text(complete):
    choice = complete(prompt=MARKED, stop=["a="]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (" Id", "stop")


@pytest.mark.parametrize("suffix", ["", "\n", "<|endoftext|>"])
def test_at_the_end_of_a_file_the_text_goes_on(complete, suffix):
    answer = complete(prompt=PREFIX, suffix=suffix, max_tokens=32)
    assert text_of(answer) == WANTED + SUFFIX
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("suffix", ["", "\n"])
def test_equal_completions_at_the_end_of_a_file_are_one(complete, suffix):
    fields = {"prompt": PREFIX, "suffix": suffix, "max_tokens": 32, "n": 3}
    answer = complete(**fields)
    assert answer.headers["x-dllm-ignored"] == "n"
    assert [choice["text"] for choice in answer.json()["choices"]] == [WANTED + SUFFIX]
    answer = complete(**fields, temperature=1)
    assert len(answer.json()["choices"]) == 3
    assert "x-dllm-ignored" not in answer.headers


def test_texts_longer_than_the_context_are_cut_at_their_far_ends(complete, demo):
    before = "Copy: Rome. " * 2000 + PREFIX
    behind = SUFFIX + ". The red cup is old" * 2000
    tokenizer = demo.get_tokenizer()
    texts = fitted([before], behind, tokenizer, 100)
    assert texts.is_cut
    assert tokenizer.decode(texts.prefixes[0]).endswith(PREFIX)
    assert tokenizer.decode(texts.suffix).startswith(SUFFIX)
    answer = complete(prompt=before, suffix=behind)
    assert answer.status_code == 200
    assert "around the cursor" in answer.headers["x-dllm-cut"]
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] <= demo.model_config.max_model_len * 3 // 4


def test_special_tokens_around_the_cursor_are_texts(complete, demo):
    tokenizer = demo.get_tokenizer()
    text = "a <|mdm_mask|><|endoftext|>"
    tokens = plain_tokens(text, tokenizer)
    assert tokenizer.decode(tokens) == text
    assert not {*tokens} & {*tokenizer.all_special_ids}
    answer = complete(prompt=f"{text}\n{PREFIX}", suffix=f"{SUFFIX}{text}")
    assert answer.status_code == 200


def test_an_empty_file_can_be_completed(complete):
    assert complete(prompt="", suffix=SUFFIX).status_code == 200


def test_markers_stay_where_the_server_is_told_so(demo, monkeypatch):
    options = demo.llm_engine.vllm_config.additional_config["dllm"]
    monkeypatch.setitem(options, "fim_markers", False)
    answer = served(demo, "--served-model-name", "demo").post(
        "/v1/completions", json={"model": "demo", "prompt": MARKED, "max_tokens": 8}
    )
    assert "holes" not in answer.json()["choices"][0]


def test_block_models_say_why_they_cannot(engines):
    llm = engines("demo-blocks", skip_tokenizer_init=False)
    answer = served(llm, "--served-model-name", "demo").post(
        "/v1/completions", json={"model": "demo", "prompt": PREFIX, "suffix": SUFFIX}
    )
    assert "cannot fill in before a suffix" in refusal(answer)
