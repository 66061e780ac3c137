"""One request of at most 50 KB, or clients that hang up, against everyone else: a plain
request of another client takes about as long as alone."""

import asyncio
import contextlib
import json
import time

import httpx
import pytest

from tests.support.server import DEMO_SERVER

pytestmark = pytest.mark.slow

PLAIN = {
    "model": "demo",
    "prompt": "User: Tom=48. Ida=07. Give: Ida, Tom\nBot:",
    "max_tokens": 16,
}
LONGER_S, TIMES = 2.0, 4.0
"""A busy machine gives a request more time than alone: a second, twice; and some times
as long as alone.
"""
TRIES = 3
"""Tests of other files run beside these, and may take the machine for a moment. What an
attack does comes again.
"""
SECONDS = 6.0
"""An attack is watched for so long. Then its client hangs up."""


def fields_of(number, field):
    names = [f"f{i}" for i in range(number)]
    return {
        "type": "object",
        "properties": dict.fromkeys(names, field),
        "required": names,
    }


INTEGERS = fields_of(90, {"type": "integer", "minimum": 7, "maximum": 1030})
FEWER_INTEGERS = fields_of(12, {"type": "integer", "minimum": 7, "maximum": 1030})
FEWER_PATTERNS = fields_of(25, {"type": "string", "pattern": "^[a-z]{1,5}$"})
"""These are within the limits."""
PATTERNS = fields_of(60, {"type": "string", "pattern": "^[a-z]{1,5}$"})
WIDE = "(a|b)*a(a|b){25}"
"""Its automaton is too large, which is known when it has taken all the time that it
may.
"""


def chat(schema):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": wanted,
        "logprobs": True,
    }


REQUESTS = {
    "responses": ("/v1/completions", {"prompt": "a", "n": 1024, "temperature": 1.0}),
    "long responses": (
        "/v1/completions",
        {"prompt": "a", "n": 1024, "temperature": 1.0, "max_tokens": 400},
    ),
    "steps of responses": (
        "/v1/completions",
        {
            "prompt": "a",
            "n": 1024,
            "temperature": 1.0,
            "stream": True,
            "vllm_xargs": {"stream_granularity": "step"},
        },
    ),
    "prompts": ("/v1/completions", {"prompt": ["a"] * 1000, "max_tokens": 32}),
    "chats": (
        "/v1/chat/completions/batch",
        {"messages": [[{"role": "user", "content": "a"}]] * 1000},
    ),
    "choices": ("/v1/decisions", {"prompt": "a", "fields": INTEGERS}),
    "patterns": ("/v1/decisions", {"prompt": "a", "fields": PATTERNS, "top_k": 100}),
    "choices that are decided": (
        "/v1/decisions",
        {"prompt": "a", "fields": FEWER_INTEGERS, "passes": 12},
    ),
    "patterns that are decided": (
        "/v1/decisions",
        {"prompt": "a", "fields": FEWER_PATTERNS, "top_k": 100},
    ),
    "passes": (
        "/v1/decisions",
        {"prompt": "a", "fields": fields_of(20, {"enum": [1, 2, 3]}), "passes": 20},
    ),
    "choices by a chat": ("/v1/chat/completions", chat(INTEGERS)),
    "patterns by a chat": ("/v1/chat/completions", chat(PATTERNS)),
    "likelihoods": (
        "/v1/likelihoods",
        {"prompt": "a" * 200, "answers": ["b" * 150] * 20, "num_samples": 18},
    ),
    "an automaton": (
        "/v1/completions",
        {"prompt": "a", "structured_outputs": {"regex": WIDE}},
    ),
    "a long prompt": ("/v1/completions", {"prompt": "a" * 49_000}),
}
HANG_UPS = {
    "likelihoods": [REQUESTS["likelihoods"]] * 60,
    "automata": [
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"regex": f"{i}{WIDE}"}},
        )
        for i in range(30)
    ],
    "choices": [
        ("/v1/decisions", {"prompt": f"{i}", "fields": INTEGERS, "top_k": i + 1})
        for i in range(30)
    ],
    "responses": [REQUESTS["long responses"]] * 4,
}


async def seconds_of(client, path="/v1/completions", body=PLAIN):
    start = time.perf_counter()
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - start


async def seconds_alone(client):
    await seconds_of(client)
    return max([await seconds_of(client) for _ in range(3)])


def client_of(servers):
    return httpx.AsyncClient(base_url=servers("dllm", *DEMO_SERVER).url, timeout=120)


def run_some_times(run):
    """Run until no assertion fails, ``TRIES`` times at most."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(AssertionError):
            return asyncio.run(run())
    return asyncio.run(run())


async def hang_up(*tasks):
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_does_not_hold_up_those_of_others(servers, kind):
    path, body = REQUESTS[kind]
    body = {"model": "demo", **body}
    assert len(json.dumps(body)) <= 50_000

    async def run():
        async with client_of(servers) as client, client_of(servers) as attacker:
            alone = await seconds_alone(client)
            beside = []
            end = time.perf_counter() + SECONDS
            attack = asyncio.create_task(attacker.post(path, json=body))
            await asyncio.sleep(0.1)
            while time.perf_counter() < end and (not attack.done() or not beside):
                beside.append(await seconds_of(client))
            if attack.done():
                assert attack.result().status_code in (200, 400), attack.result().text
            await hang_up(attack)
            beside.append(await seconds_of(client))
            assert max(beside) < TIMES * alone + LONGER_S, (
                f"{beside} s, and {alone} s alone"
            )

    run_some_times(run)


@pytest.mark.parametrize("kind", HANG_UPS)
def test_what_clients_that_hung_up_have_asked_for_does_not_hold_up_others(
    servers, kind
):
    async def run():
        async with client_of(servers) as client:
            alone = await seconds_alone(client)
            async with client_of(servers) as leaving:
                bodies = [
                    (path, {"model": "demo", **body}) for path, body in HANG_UPS[kind]
                ]
                tasks = [
                    asyncio.create_task(leaving.post(path, json=body))
                    for path, body in bodies
                ]
                await asyncio.sleep(1)
                await hang_up(*tasks)
            await asyncio.sleep(0.2)
            plain = await seconds_of(client)
            constrained = await seconds_of(
                client, body=PLAIN | {"structured_outputs": {"regex": f"x|{kind}"}}
            )
            assert plain < TIMES * alone + LONGER_S, f"{alone} s alone"
            assert constrained < TIMES * alone + 5 * LONGER_S, (
                "its automaton takes a process, and no other's turn"
            )

    run_some_times(run)


def test_a_large_body_is_refused_and_others_are_answered(servers):
    async def chunks():
        for _ in range(40):
            yield b"x" * (1 << 20)

    async def run():
        async with client_of(servers) as client:
            for content in (b"x" * (40 << 20), chunks()):
                attack = asyncio.create_task(
                    client.post("/v1/completions", content=content)
                )
                alone = await seconds_alone(client)
                assert (await attack).status_code == 413
                assert await seconds_of(client) < TIMES * alone + LONGER_S

    run_some_times(run)
