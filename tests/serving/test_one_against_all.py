"""One request of at most 50 KB, or clients that hang up, against everyone else: a plain
request of another client waits for little more work than alone. Counted in the work of
the server, which other programs on the machine do not change.
"""

import asyncio
import contextlib
import json
import time
from typing import NamedTuple

import httpx
import psutil
import pytest

from tests.support.server import DEMO_SERVER, scrape

pytestmark = pytest.mark.slow

PLAIN = {
    "model": "demo",
    "prompt": "User: Tom=48. Ida=07. Give: Ida, Tom\nBot:",
    "max_tokens": 16,
}


class Work(NamedTuple):
    """Work of a server while it answers a request."""

    steps: float
    """Batches of the engine."""
    rows: float
    """Rows that it computes in them."""
    seconds: float
    """Processor time of the front end."""


TIMES = 4
MORE = Work(steps=100, rows=30_000, seconds=2.0)
"""A request may take so much work beside others: some times as much as alone, and as
much again as steps that began before it take.
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


def work_so_far(server):
    counts = scrape(server.url)
    time_used = psutil.Process(server.process.pid).cpu_times()
    return Work(
        counts["vllm:dllm_engine_steps_total"],
        counts["vllm:dllm_tokens_computed_total"],
        time_used.user + time_used.system,
    )


class Client(httpx.AsyncClient):
    """A client that counts what the server does until it answers."""

    def __init__(self, servers):
        self.server = servers("dllm", *DEMO_SERVER)
        super().__init__(base_url=self.server.url, timeout=120)

    async def work_of(self, body=PLAIN):
        before = await asyncio.to_thread(work_so_far, self.server)
        answer = await self.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        after = await asyncio.to_thread(work_so_far, self.server)
        return Work(*(b - a for a, b in zip(before, after, strict=True)))

    async def work_alone(self):
        await self.work_of()
        return Work(*map(max, *[await self.work_of() for _ in range(3)]))


def assert_little_more(work, alone, more=MORE):
    most = Work(*(TIMES * a + b for a, b in zip(alone, more, strict=True)))
    assert all(a <= b for a, b in zip(work, most, strict=True)), (work, most)


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
        async with Client(servers) as client, Client(servers) as attacker:
            alone = await client.work_alone()
            end = time.perf_counter() + SECONDS
            attack = asyncio.create_task(attacker.post(path, json=body))
            await asyncio.sleep(0.1)
            is_first = True
            while is_first or (time.perf_counter() < end and not attack.done()):
                assert_little_more(await client.work_of(), alone)
                is_first = False
            if attack.done():
                assert attack.result().status_code in (200, 400), attack.result().text
            await hang_up(attack)
            assert_little_more(await client.work_of(), alone)

    asyncio.run(run())


@pytest.mark.parametrize("kind", HANG_UPS)
def test_what_clients_that_hung_up_have_asked_for_does_not_hold_up_others(
    servers, kind
):
    async def run():
        async with Client(servers) as client:
            alone = await client.work_alone()
            async with Client(servers) as leaving:
                tasks = [
                    asyncio.create_task(
                        leaving.post(path, json={"model": "demo", **body})
                    )
                    for path, body in HANG_UPS[kind]
                ]
                await asyncio.sleep(1)
                await hang_up(*tasks)
            assert_little_more(await client.work_of(), alone)
            # Its automaton takes a process, and no other's turn.
            constrained = PLAIN | {"structured_outputs": {"regex": f"x|{kind}"}}
            assert_little_more(await client.work_of(constrained), alone)

    asyncio.run(run())


def test_a_large_body_is_refused_and_others_are_answered(servers):
    async def chunks():
        for _ in range(40):
            yield b"x" * (1 << 20)

    async def run():
        async with Client(servers) as client:
            alone = await client.work_alone()
            for content in (b"x" * (40 << 20), chunks()):
                attack = asyncio.create_task(
                    client.post("/v1/completions", content=content)
                )
                assert_little_more(await client.work_of(), alone)
                assert (await attack).status_code == 413

    asyncio.run(run())
