"""Requests whose client leaves while their length is chosen."""

import asyncio
import json
from typing import Any

import pytest

from tests.support.engines import assert_nothing_left
from tests.support.http_app import EngineInProcess

QUESTION = "User: Tom=48. Ida=07. Max=31. Give: Ida, Max\nBot:"
SHORT: dict[str, Any] = {"auto_length_start": 8, "auto_length_tail": 4}
OPEN: dict[str, dict[str, Any]] = {
    "response": {"vllm_xargs": {"auto_length": True, **SHORT}},
    "hole": {"suffix": ", Max=31", "n": 2},
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", OPEN)
def test_a_client_that_leaves_ends_the_choice(
    client, demo, kind, streamed, monkeypatch
):
    """The pass that runs is the last one, and the engine never gets the request."""
    names: list[str] = []
    begun, left = asyncio.Event(), asyncio.Event()
    original = EngineInProcess.collective_rpc

    async def pass_until_the_client_has_left(self, name, **kwargs):
        names.append(name)
        begun.set()
        await left.wait()
        return await original(self, name, **kwargs)

    monkeypatch.setattr(
        EngineInProcess, "collective_rpc", pass_until_the_client_has_left
    )
    body = {"model": "demo", "prompt": QUESTION, "stream": streamed, **OPEN[kind]}
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }

    async def receive():
        if (message := next(messages, None)) is not None:
            return message
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    async def leave():
        await client.app(scope, receive, send)
        left.set()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=60)

    asyncio.run(leave())
    assert names == ["masked_logprobs", "drop_probes"]
    assert_nothing_left(demo)
    monkeypatch.undo()
    answer = client.post("/v1/completions", json={**body, "stream": False})
    assert answer.json()["choices"][0]["text"].startswith(" Ida=07")
