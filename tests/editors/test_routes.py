"""Routes of editors, each asked as its clients ask and read as they read."""

import json
import re

import pytest

from dllm_engine.cli import serve
from dllm_engine.editors.routes import FACTS, OWN_BODIES
from tests.editors.test_completions import MARKED, PREFIX, SUFFIX, WANTED
from tests.support.engines import assert_nothing_left
from tests.support.http_app import chunks_of, served

INFILL = {"input_prefix": PREFIX[:-4], "prompt": PREFIX[-4:], "input_suffix": SUFFIX}
GENERATE = {"model": "demo:latest", "prompt": PREFIX, "suffix": SUFFIX}
BODIES = {
    "/v1/fim/completions": {"model": "demo", "prompt": PREFIX, "suffix": SUFFIX},
    "/infill": INFILL,
    "/completion": {"prompt": MARKED},
    "/api/generate": GENERATE,
}


def events_of(answer):
    """Server-sent events without OpenAI's last one."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(part[6:]) for part in answer.text.strip().split("\n\n")]


@pytest.mark.parametrize("length", [{}, {"max_tokens": 256}])
def test_mistral_and_inception(client, length):
    body = BODIES["/v1/fim/completions"] | length
    body |= {"random_seed": 2**64 - 1, "stop": ["[PREFIX]"], "presence_penalty": 1.5}
    answer = client.post("/v1/fim/completions", json=body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == choice["message"]["content"] == WANTED
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 4
    chunks = chunks_of(client.post("/v1/fim/completions", json=body | {"stream": True}))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for text in (
        (c["text"] for c in choices),
        (c["delta"]["content"] for c in choices),
    ):
        assert "".join(text) == WANTED
    assert choices[-1]["finish_reason"] == "stop"
    assert chunks[-1]["usage"] == answer["usage"]


def test_llama_vim_and_vscode(client, demo):
    probe = client.get("/props").json()
    n_ctx = probe["default_generation_settings"]["n_ctx"]
    assert n_ctx == demo.model_config.max_model_len
    assert client.get("/health").json() == {"status": "ok"}
    extra = [{"filename": "b.py", "text": "x = 1\n", "time": 1}]
    more = {
        "input_extra": extra,
        "n_predict": 128,
        "samplers": ["top_k", "top_p", "infill"],
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 500,
        "cache_prompt": True,
        "id_slot": 0,
        "stream": False,
    }
    answer = client.post("/infill", json=INFILL | more)
    assert re.search(r'"content"\s*:', answer.text)
    assert answer.json()["content"] == WANTED
    several = client.post("/infill", json=INFILL | {"n_cmpl": 3}).json()
    assert len({each["content"] for each in several}) == 3
    assert several[0]["content"] == WANTED
    assert several[0]["tokens_predicted"] == 4
    at_end = INFILL | {"input_suffix": "\n", "n_cmpl": 3}
    assert len(client.post("/infill", json=at_end).json()) == 1
    kept = client.post("/infill", json=INFILL | {"response_fields": ["content", ""]})
    assert kept.json() == {"content": WANTED}
    far = INFILL | {"input_prefix": "Copy: Rome. " * 2000, "prompt": PREFIX}
    assert client.post("/infill", json=far).json()["truncated"]
    other = client.post("/infill", json=INFILL | {"model": "another"}).json()
    assert (other["content"], other["model"]) == (WANTED, "demo")
    warm = client.post("/infill", json=INFILL | {"n_predict": 0})
    assert warm.json()["content"] == ""


@pytest.mark.parametrize("path", ["/infill", "/completion"])
def test_streams_of_llama_cpp(client, path):
    answer = client.post(path, json=BODIES[path] | {"stream": True})
    *parts, last = events_of(answer)
    assert "".join(part["content"] for part in parts) == WANTED
    assert {part["stop"] for part in parts} == {False}
    assert (last["stop"], last["tokens_predicted"]) == (True, 4)
    empty = BODIES[path] | {"stream": True, "max_tokens": 1}
    *_, last = events_of(client.post(path, json=empty))
    assert (last["tokens_predicted"], last["tokens_evaluated"]) == (0, 32)


def test_ollama(client):
    for body in (GENERATE, {"model": "demo", "prompt": MARKED, "raw": True}):
        options = {"num_predict": 4096, "stop": ["a"] * 14, "num_ctx": 8192}
        lines = client.post("/api/generate", json=body | {"options": options}).text
        assert lines.endswith("\n")
        *parts, last = map(json.loads, lines.splitlines())
        assert "".join(part["response"] for part in parts) == WANTED.partition("a")[0]
        assert (last["done"], last["done_reason"]) == (True, "stop")
    whole = client.post("/api/generate", json=GENERATE | {"stream": False}).json()
    assert (whole["response"], whole["eval_count"]) == (WANTED, 4)
    loaded = client.post("/api/generate", json={"model": "demo", "stream": False})
    assert loaded.json()["done_reason"] == "load"
    shown = client.post("/api/show", json={"name": "demo"}).json()
    assert ".Suffix" in shown["template"]
    assert {"completion", "insert"} == {*shown["capabilities"]}
    assert client.post("/api/show", json={"model": "x"}).status_code == 404
    (model,) = client.get("/api/tags").json()["models"]
    assert model["name"] == "demo"
    assert client.get("/api/version").json()["version"] >= "0.6.4"
    assert client.get("/").text == "Ollama is running"


EDITED = " Tom=48, Ida=07, Max=31"


@pytest.mark.parametrize(
    ("rest", "wanted"), [(", Max", f"```\n{EDITED}\n```"), (" Ida=07, Max=31", "None")]
)
def test_an_edit_changes_the_rest_of_the_cursors_line(client, rest, wanted):
    region = f"<|code_to_edit|>{PREFIX[-8:]}<|cursor|>{rest}<|/code_to_edit|>"
    content = f"{PREFIX[:-8]}{region}<|/current_file_content|>"
    message = {"role": "user", "content": content}
    body = {"messages": [message], "max_tokens": 32}
    answer = client.post("/v1/edit/completions", json=body).json()
    assert answer["object"] == "edit.completion"
    assert answer["choices"][0]["message"]["content"] == wanted
    (chunk,) = chunks_of(client.post("/v1/edit/completions", json=body | {"stream": 1}))
    assert chunk["choices"][0]["delta"]["content"] == wanted
    message["content"] = PREFIX
    answer = client.post("/v1/edit/completions", json=body)
    assert "code_to_edit" in message_of(answer)


def test_an_application_copies_what_it_keeps(client):
    snippet = f"def b():\n    return 3\n\n{KEPT}"
    content = (
        f"<|original_code|>\n{FILE}\n<|/original_code|>\n\n"
        f"<|update_snippet|>\n{KEPT}\n{snippet}\n<|/update_snippet|>"
    )
    body = {"messages": [{"role": "user", "content": content}]}
    wanted = FILE.replace("return 2", "return 3")
    answer = client.post("/v1/apply/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == wanted
    (chunk,) = chunks_of(
        client.post("/v1/apply/completions", json=body | {"stream": 1})
    )
    assert chunk["choices"][0]["delta"]["content"] == wanted
    new = "def d():\n    return 4"
    body["messages"][0]["content"] = content.replace(snippet, f"{new}\n{KEPT}")
    answer = client.post("/v1/apply/completions", json=body).json()
    above, written, below = answer["choices"][0]["message"]["content"].partition(new)
    assert written
    assert (above + below).replace("\n\n\n", "\n\n").startswith(FILE[:40])


KEPT = "# ... existing code ..."
FILE = "import os\n\ndef a():\n    return 1\n\ndef b():\n    return 2\n\ndef c():\n    return a"


def test_inceptions_client_lists_models(client):
    for kind in ("fim", "edit", "chat"):
        (model,) = client.get(f"/v1/{kind}/completions/models").json()["data"]
        assert model["id"] == "demo"


def message_of(answer):
    error = answer.json()["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"prompt": 5, "input_prefix": 5}, 400),
        ({"temperature": -1, "options": {"temperature": -1}}, 400),
        ({"stop": 3, "options": {"stop": 3}}, 400),
    ],
    ids=str,
)
def test_what_cannot_be_answered_is_told(client, demo, path, change, status):
    for stream in (False, True):
        answer = client.post(path, json=BODIES[path] | change | {"stream": stream})
        assert answer.status_code == status, answer.text
        assert message_of(answer)
    assert client.post(path, content=b"{").status_code == 400
    assert_nothing_left(demo)


@pytest.mark.parametrize("path", ["/v1/fim/completions", "/api/generate"])
def test_a_model_that_is_not_served_is_not_found(client, path):
    answer = client.post(path, json=BODIES[path] | {"model": "another"})
    assert answer.status_code == 404
    assert message_of(answer)


def test_the_api_key_is_asked_for(demo):
    client = served(demo, "--served-model-name", "demo", "--api-key", "secret")
    key = {"Authorization": "Bearer secret"}
    for path in OWN_BODIES:
        body = BODIES.get(path, {"model": "demo"})
        assert client.post(path, json=body).status_code == 401
        assert client.post(path, json=body, headers=key).status_code != 401
    for path in FACTS:
        assert client.get(path).status_code == 401
        assert client.get(path, headers=key).status_code == 200


def test_help_names_all_routes():
    assert not [route for route in (*OWN_BODIES, *FACTS) if route not in serve.__doc__]
