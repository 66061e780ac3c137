"""Requests that no client should send, to a real server: each gets an answer, none an
internal error, and the server goes on as before."""

import http.client
import json
import math
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from dllm_engine.request_options.fields import RequestOptions
from tests.support.server import DEMO_SERVER, scrape

pytestmark = pytest.mark.slow

SECONDS = 30
"""Far above what any of these answers takes."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD: dict[str, Any] = {
    CHAT: {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tom=48. Ida=07. Give: Ida"}],
        "max_tokens": 8,
    },
    COMPLETIONS: {
        "model": "demo",
        "prompt": "Tom=48. Ida=07. Give: Ida",
        "max_tokens": 8,
    },
}


@pytest.fixture(scope="module")
def server(servers):
    return servers("dllm", *DEMO_SERVER)


def post(server, path: str, body: bytes, method: str = "POST") -> tuple[int, bytes]:
    """Status and body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def ask(server, path: str, body: object) -> tuple[int, bytes]:
    return post(server, path, json.dumps(body).encode())


def texts(server) -> list[str]:
    """What the server says to good requests."""
    answers = [ask(server, path, body) for path, body in GOOD.items()]
    assert [status for status, _ in answers] == [200, 200]
    (chat,), (completion,) = (json.loads(body)["choices"] for _, body in answers)
    return [chat["message"]["content"], completion["text"]]


@pytest.fixture(scope="module", autouse=True)
def unharmed(server):
    """After all of this the server answers as before, and holds nothing."""
    before = texts(server)
    yield
    assert texts(server) == before
    values = scrape(server.url)
    assert (
        values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    )
    assert values["vllm:dllm_pages_reserved"] == 0


def check(answer: tuple[int, bytes], sent: object) -> None:
    """An answer, or a refusal that says what is wrong; 501 is that of a route of vLLM
    which the model does not have.
    """
    status, body = answer
    shown = f"{json.dumps(sent)[:500]} was answered with {status}: {body[:500]!r}"
    assert status in (200, 501) or 400 <= status < 500, shown
    if status >= 400:
        refusal = json.loads(body)
        error = refusal.get("error")  # a text in Ollama's form
        message = error["message"] if isinstance(error, dict) else error
        assert refusal.get("detail") or message, shown
    else:
        assert b'"code":500' not in body.replace(b" ", b""), shown


ODD_NUMBERS = [
    0,
    -1,
    1,
    2,
    17,
    2**31,
    10**12,
    2**63,
    -(2**63),
    10**30,
    10**400,
    0.0,
    -0.5,
    0.5,
    1.5,
    1e308,
    5e-324,
    math.nan,
    math.inf,
    -math.inf,
]
ODD_TEXTS = [
    "",
    " ",
    "step",
    "best",
    "0",
    "1",
    "nan",
    "../../etc/passwd",
    "file:///etc/passwd",
    "\0",
    "\ud800",
    "é漢😀",
    "x" * 5000,
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(ODD_NUMBERS),
    st.integers(-40, 40),
    st.floats(),
    st.sampled_from(ODD_TEXTS),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
OPTIONS = st.sampled_from(
    [
        *RequestOptions.model_fields,
        "cfg_scale",
        "kv_transfer_params",
        "kv_cache_report_mode",
        "",
        "x",
    ]
)


@pytest.fixture
def bounded(request):
    """``bounded(count)``: so many examples, the same in each run; ``--red-team N``
    draws N times as many.
    """
    times = request.config.getoption("red_team")
    same: dict[str, Any] = {
        "derandomize": True,
        "deadline": None,
        "database": None,
        "suppress_health_check": list(HealthCheck),
    }
    return lambda count: settings(max_examples=times * count, **same)


@pytest.fixture
def ask_with_odd_values(server, bounded):
    def ask_all(
        path: str, plausible: dict, odd: st.SearchStrategy, count: int = 40
    ) -> None:
        @bounded(count)
        @given(odd, st.booleans())
        def fuzz(fields, stream):
            body = plausible | {"stream": stream} | fields
            check(ask(server, path, body), {"route": path, **body})

        fuzz()

    return ask_all


KEYWORDS = "type properties items enum const anyOf $ref required minLength pattern minimum".split()
SCHEMAS = st.recursive(
    SCALARS
    | st.sampled_from(
        ["object", "array", "string", "integer", "#/$defs/a", "(a", "[a-z]{1,999}"]
    ),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3)
    ),
    max_leaves=8,
)
STRUCTURES = "regex choice json json_object grammar structural_tag whitespace".split()
FORMATS = st.sampled_from(["json_schema", "structural_tag", "text", "x"])


def structured(name: str, value: object, kind: str) -> dict[str, object]:
    if name in STRUCTURES:
        return {"structured_outputs": {name: value}}
    if name == "tools":
        tool = {"type": "function", "function": {"name": "x", "parameters": value}}
        return {"tools": [tool], "tool_choice": "required"}
    value = {"name": "x", "schema": value} if name == "json_schema" else value
    return {"response_format": {"type": kind, name: value}}


STRUCTURED = st.builds(
    structured,
    st.sampled_from(
        [*STRUCTURES, *["tools"] * 8, "json_schema", "format", "structures"]
    ),
    SCHEMAS,
    FORMATS,
)
STANDARD = {
    CHAT: [*ChatCompletionRequest.model_fields],
    COMPLETIONS: [*CompletionRequest.model_fields],
}
OURS = st.dictionaries(OPTIONS, VALUES, min_size=1, max_size=2).map(
    lambda odd: {"vllm_xargs": odd}
)
ODD = {
    "our options": (150, lambda path: OURS),
    "standard": (
        300,
        lambda path: st.dictionaries(
            st.sampled_from(STANDARD[path]), VALUES, min_size=1, max_size=2
        ),
    ),
    "structured output": (200, lambda path: STRUCTURED),
}
"""How many examples to draw, and the fields of a body for a path."""


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("odd", ODD)
def test_odd_values(ask_with_odd_values, path, odd):
    count, fields_for = ODD[odd]
    ask_with_odd_values(path, GOOD[path], fields_for(path), count)


MALFORMED = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b'{"model":',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"model":"demo","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"model":"demo","messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"model":"demo","prompt":"x","messages":[],"max_tokens":' + b"9" * 5000 + b"}",
    b'{"model":"demo","prompt":"x","messages":[],"temperature":1e999}',
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_body_that_is_damaged_is_refused(server, bounded, path):
    good = json.dumps(GOOD[path]).encode()

    @bounded(60)
    @given(st.integers(0, len(good) - 1), st.binary(max_size=3))
    def fuzz(position, piece):
        check(
            post(server, path, good[:position] + piece + good[position + 1 :]),
            "a body with other bytes in it",
        )
        assert post(server, path, good[:position] + piece)[0] == 400

    fuzz()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_half_a_body_holds_nobody_up(server, path):
    body = json.dumps(GOOD[path]).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    )
    waiting = []
    for number in range(20):
        connection = socket.create_connection(
            ("127.0.0.1", server.port), timeout=SECONDS
        )
        connection.sendall(
            f"{head}Content-Length: {len(body) + 100}\r\n\r\n".encode()
            + body[: number * 5]
        )
        waiting.append(connection)
    for connection in waiting[:10]:
        connection.close()
    assert ask(server, path, GOOD[path])[0] == 200, (
        "while ten clients still owe the rest"
    )
    for connection in waiting[10:]:
        connection.close()


def test_no_route_answers_an_odd_body_with_an_internal_error(
    server, ask_with_odd_values
):
    """Every route of the server, with what its schema asks for and odd values in it."""
    api = json.loads(post(server, "/openapi.json", b"", "GET")[1])
    schemas = api["components"]["schemas"]
    for path, methods in sorted(api["paths"].items()):
        operation = methods.get("post")
        if operation is None:
            continue
        for body in (*MALFORMED, b"{}", b"5", b"[1]"):
            answer = post(server, path, body)
            check(answer, f"{path}: {body[:80]!r}")
            assert path not in GOOD or answer[0] == 400, body[:80]
        content = (
            operation.get("requestBody", {})
            .get("content", {})
            .get("application/json", {})
        )
        reference = content.get("schema", {}).get("$ref", "").rsplit("/", 1)[-1]
        fields = sorted(schemas.get(reference, {}).get("properties", ())) or [
            "new_data_parallel_size",
            "drain_timeout",
        ]
        plausible = {
            "model": "demo",
            "max_tokens": 4,
            "prompt": "x",
            "input": "x",
            "query": "x",
            "items": ["x"],
            "messages": [{"role": "user", "content": "x"}],
            "tokens": [5, 6],
            "label_token_ids": [5, 6],
        }

        ask_with_odd_values(
            path,
            plausible,
            st.dictionaries(st.sampled_from(fields), VALUES, max_size=2),
        )


def test_files_named_in_requests_are_not_opened(server, tmp_path):
    """Neither as an image, nor as a prompt, nor below the playground."""
    secret = tmp_path / "secret.txt"
    secret.write_text("swordfish")
    image = [{"type": "image_url", "image_url": {"url": secret.as_uri()}}]
    for path, odd in [
        (CHAT, {"messages": [{"role": "user", "content": image}]}),
        (CHAT, {"chat_template": str(secret)}),
        (COMPLETIONS, {"prompt_embeds": str(secret)}),
        (CHAT, {"vllm_xargs": {"guide_model": str(secret)}}),
        (COMPLETIONS, {"vllm_xargs": {"profile": str(secret)}}),
    ]:
        status, answer = ask(server, path, GOOD[path] | odd)
        assert status == 400, answer
        assert b"swordfish" not in answer
    for path in (
        f"/playground/..{secret}",
        f"/playground/{secret}",
        "/playground/%2e%2e/page.html",
    ):
        assert post(server, path, b"", "GET")[0] == 404
