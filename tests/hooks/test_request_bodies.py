"""Bodies that vLLM's request classes would trip over, against its HTTP application
without an engine.
"""

import asyncio
import inspect
import json
from functools import cache
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.entrypoints import serve

from dllm_engine.editors.routes import OWN_BODIES
from dllm_engine.params import ELSEWHERE, VLLM_OPTIONS
from dllm_engine.request_options.fields import RequestOptions
from dllm_engine.vllm_hooks.server.bodies import MOST_BYTES, BodyCheck
from dllm_engine.vllm_hooks.server.open_requests import Answers, OpenRequests
from tests.support.http_app import app_client, refusal

PATH = "/v1/completions"


@pytest.mark.parametrize("odd", ["text", 7, 0.5, True, ["json"], []], ids=str)
def test_structured_outputs_that_is_no_object_is_refused_by_name(odd):
    answer = app_client().post(
        PATH, json={"model": "demo", "prompt": "x", "structured_outputs": odd}
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "structured_outputs"
    assert f"is a {type(odd).__name__}, not an object" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "structured_outputs"}',
        b'{"structured_outputs": null}',
        b'{"structured_outputs": {"regex": "a"}}',
        b'{"nested": {"structured_outputs": 7}}',
        b'["structured_outputs"]',
        b'{"structured_outputs": ',
        b"",
    ],
    ids=lambda body: body[:40].decode(),
)
def test_everything_else_is_left_to_vllm(body):
    # An application without an engine has no such route.
    assert app_client().post(PATH, content=body).status_code == 404


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 50_000], ids=["lists", "objects"]
)
def test_what_is_nested_too_deeply_to_be_parsed_is_refused(body):
    answer = app_client().post(
        PATH, content=body, headers={"Content-Type": "application/json"}
    )
    assert "too many lists and objects" in refusal(answer)


def test_servers_of_other_models_are_left_alone():
    assert (
        app_client(ours=False)
        .post(PATH, json={"structured_outputs": "text"})
        .status_code
        == 404
    )


@pytest.mark.parametrize("path", [PATH, "/invocations", "/generative_scoring"])
def test_the_key_is_asked_for_wherever_prompts_are_answered(path):
    body = (
        b"[" * 100_000
    )  # what the check of bodies refuses was let through by that of keys
    client = app_client("--api-key", "secret")
    assert client.post(path, content=body).status_code == 401
    assert (
        client.post(
            path, content=body, headers={"Authorization": "Bearer guess"}
        ).status_code
        == 401
    )
    assert (
        client.post(
            path, content=body, headers={"Authorization": "Bearer secret"}
        ).status_code
        == 400
    )
    assert client.options(path).status_code != 401
    assert client.get("/health").status_code != 401
    assert app_client().post(path, content=body).status_code == 400


def test_the_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setattr("vllm.envs.VLLM_API_KEY", "secret", raising=False)
    assert app_client().post("/invocations", content=b"{}").status_code == 401


def test_bodies_arrive_whole_and_clients_that_leave_midway_do_not_reach_the_application():
    def through_the_check(*messages):
        """The messages that the application behind the check receives."""
        received, pending = [], iter(messages)

        async def application(scope, receive, send):
            received.extend([await receive(), await receive()])

        async def receive():
            return next(pending)

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "headers": [],
        }
        state = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={}))
        scope["app"] = SimpleNamespace(state=state)
        answers = Answers(BodyCheck(application), OpenRequests())
        asyncio.run(answers(scope, receive, None))
        return received

    body = json.dumps({"prompt": "x" * 100, "max_tokens": 8}).encode()
    parts = [
        {"type": "http.request", "body": body[i : i + 30], "more_body": True}
        for i in range(0, len(body), 30)
    ]
    gone, whole = (
        {"type": "http.disconnect"},
        {"type": "http.request", "body": body, "more_body": False},
    )
    assert through_the_check(*parts, {"type": "http.request"}, gone) == [whole, gone]
    assert through_the_check(*parts, gone) == []


@pytest.mark.parametrize("ours", [True, False])
def test_a_route_that_would_stop_the_engine_is_left_out(ours):
    client = app_client(ours=ours, tasks=("generate",))
    status = client.post(
        "/scale_elastic_ep", json={"new_data_parallel_size": 2}
    ).status_code
    assert (status == 404) is ours


@pytest.mark.parametrize("ours", [True, False])
def test_decisions_of_vllms_own_models_make_room_for_ours(ours, monkeypatch):
    """As vLLM 0.33 registers them."""
    register = serve.register_vllm_serve_api_routers
    both = lambda app: (register(app), app.post("/v1/decisions")(lambda: "of vLLM"))  # noqa: E731
    monkeypatch.setattr(serve, "register_vllm_serve_api_routers", both)
    answer = app_client(ours=ours, tasks=("generate",)).post("/v1/decisions", json={})
    assert "fields" in refusal(answer) if ours else answer.json() == "of vLLM"


@cache
def every_route():
    return app_client("--enable-scale-out", tasks=("generate",))


OWN_NAMES = {*RequestOptions.model_fields, *ELSEWHERE} - VLLM_OPTIONS


def routes_with_bodies():
    """(path, names of the fields of its body) of each route that answers a POST."""
    routes = every_route().app.routes
    fields = {}
    for route in (
        route for route in routes if "POST" in (getattr(route, "methods", None) or ())
    ):
        annotations = [
            p.annotation for p in inspect.signature(route.endpoint).parameters.values()
        ]
        classes = [
            each
            for annotation in annotations
            for each in get_args(annotation) or [annotation]
        ]
        fields[route.path] = {
            name for each in classes for name in getattr(each, "model_fields", ())
        }
    return fields


def test_no_route_has_a_field_of_its_own_of_that_name():
    fields = routes_with_bodies()
    assert {"max_tokens", "vllm_xargs"} <= fields["/v1/messages"] & fields[
        "/v1/chat/completions/render"
    ]
    assert set().union(*fields.values()) & OWN_NAMES == {"top_p", "top_k"}


@pytest.mark.parametrize(
    "path", sorted({*routes_with_bodies()} - {"/v1/systemone", *OWN_BODIES})
)
def test_an_option_of_ours_is_refused_wherever_vllm_would_ignore_it(path):
    client = every_route()
    own = {"passes", "template"} if path == "/v1/decisions" else set()
    for name in OWN_NAMES - {"top_p", "top_k"} - own:
        assert name in refusal(
            client.post(
                path.replace("{response_id}", "7"), json={"messages": [], name: None}
            )
        )
    assert "belongs into" in refusal(client.post(path, json={"steps": 8}))


@pytest.mark.parametrize(
    "fields",
    [{"vllm_xargs": {"steps": 8}}, {"sampling_params": {"steps": 8}}, {"steps": 8}],
)
def test_tokens_in_tokens_out_has_another_place_for_them(fields):
    answer = every_route().post(
        "/inference/v1/generate",
        json={"token_ids": [5], "sampling_params": {}} | fields,
    )
    assert "sampling_params.extra_args" in refusal(answer)


LARGE = b'{"prompt": "' + b"x" * MOST_BYTES + b'"}'


@pytest.mark.parametrize("is_chunked", [False, True], ids=["by its length", "chunked"])
def test_a_body_that_is_too_large_is_refused_before_it_is_read(is_chunked):
    """Of chunks, no more are read than are allowed."""
    num_read = 0

    async def receive():
        nonlocal num_read
        part = (
            LARGE[num_read : num_read + (1 << 20)]
            if is_chunked
            else pytest.fail("it was read")
        )
        num_read += len(part)
        return {"type": "http.request", "body": part, "more_body": True}

    sent = []

    async def send(message):
        sent.append(message)

    headers = [] if is_chunked else [(b"content-length", str(len(LARGE)).encode())]
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
    check = BodyCheck(lambda *args: pytest.fail("it was answered"))
    asyncio.run(Answers(check, OpenRequests())(scope, receive, send))
    assert sent[0]["status"] == 413
    error = json.loads(sent[1]["body"])["error"]
    assert (
        "over 16777216 bytes (16 MiB), which is the most; send its prompts in several "
        "requests" in error["message"]
    )
    assert error["code"] == 413
    assert num_read <= MOST_BYTES + (1 << 20)


def test_a_body_of_the_most_bytes_is_read():
    answer = app_client().post(
        PATH,
        content=LARGE[:12] + LARGE[26:],
        headers={"content-type": "application/json"},
    )
    assert answer.status_code != 413
