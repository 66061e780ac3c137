"""A server under load: clients that ask all kinds of things at once, of which a fifth
hangs up midway.

First every request is asked alone. Then all are asked at once, in random order, with
the real OpenAI client. Each gets the answer that it got alone (so no token of one
request is in another), and nothing is left running or in pages.
"""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from dllm_engine.demo.tasks import TASKS, make_examples
from tests.support.preloaded import wait_until
from tests.support.server import DEMO_SERVER, scrape

pytestmark = pytest.mark.slow

NUM_ROUNDS = 3
HANG_UPS = 0.2
TIMEOUT_S = 60.0
LEFT = (
    "dllm_pages_reserved",
    "dllm_pages_allocated",
    "num_requests_running",
    "num_requests_waiting",
)
"""What is 0 on ``/metrics`` where nothing is left."""


Answer = dict[int, tuple[str, str | None]]
"""Text and reason of the end, by the number of the choice."""


def wait_until_idle(url: str) -> None:
    wait_until(lambda: not any(scrape(url)[f"vllm:{name}"] for name in LEFT), TIMEOUT_S)


@dataclass(frozen=True)
class Ask:
    """One request; ``refused`` if it must be answered with 400."""

    chat: bool
    arguments: dict[str, Any]
    refused: bool


def draw_ask(rng: random.Random) -> Ask:
    (example,) = make_examples(rng.choice(TASKS), 1, seed=rng.randrange(1_000_000))
    chat, refused = rng.random() < 0.5, rng.random() < 0.1
    options: dict[str, Any] = {"block_length": rng.choice([4, 8])}
    options |= rng.choice([{}, {"threshold": 0.9}, {"retention_ratio": 0.25}])
    arguments: dict[str, Any] = {
        "model": "demo",
        "max_tokens": rng.choice([8, 16, 32, 64]),
        "stream": rng.random() < 0.5,
        "seed": rng.randrange(1000),
        **rng.choice([{}, {"temperature": 1.0, "n": 2}]),
        **rng.choice([{}, {}, {"stop": ["=", "."]}]),
    }
    if chat:
        arguments["messages"] = [{"role": "user", "content": example.prompt}]
    else:
        arguments["prompt"] = example.prompt
    if arguments["stream"] and rng.random() < 0.3:
        options["stream_granularity"] = "step"
    if refused:
        options |= {"steps": 0}
    arguments["extra_body"] = {"vllm_xargs": options, "ignore_eos": rng.random() < 0.5}
    return Ask(chat, arguments, refused)


async def answer(
    client: openai.AsyncOpenAI, ask: Ask, chunks: float = float("inf")
) -> Answer | None:
    """The answer of the server, None if it refuses; of a stream at most ``chunks``,
    then the client hangs up.
    """
    create: Any = (
        client.chat.completions.create if ask.chat else client.completions.create
    )
    if ask.refused:
        with pytest.raises(openai.BadRequestError):
            await create(**ask.arguments)
        return None
    response = await create(**ask.arguments)
    if not ask.arguments["stream"]:
        return {
            c.index: (c.message.content if ask.chat else c.text, c.finish_reason)
            for c in response.choices
        }
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    received = 0
    async for chunk in response:
        for choice in chunk.choices:
            text = (choice.delta.content if ask.chat else choice.text) or ""
            texts[choice.index] = texts.get(choice.index, "") + text
            reasons[choice.index] = choice.finish_reason
        received += 1
        if received >= chunks:
            break
    await response.close()
    return {index: (text, reasons[index]) for index, text in texts.items()}


async def hang_up(client: openai.AsyncOpenAI, ask: Ask, rng: random.Random) -> None:
    """Go after some chunks of a stream, or some time."""
    chunks, seconds = rng.randint(1, 4), rng.uniform(0.01, 0.5)
    with suppress(TimeoutError):
        async with asyncio.timeout(None if ask.arguments["stream"] else seconds):
            await answer(client, ask, chunks)


def test_answers_under_load_are_those_given_alone(servers):
    url = servers("dllm", *DEMO_SERVER).url
    rng = random.Random(1)
    asks = [draw_ask(rng) for _ in range(40)]

    async def run():
        async with openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
        ) as client:
            alone = [await answer(client, ask) for ask in asks]
            for _ in range(NUM_ROUNDS):
                shuffled = rng.sample(range(len(asks)), len(asks))
                leaving = {number for number in shuffled if rng.random() < HANG_UPS}
                answers = await asyncio.gather(
                    *(
                        hang_up(client, asks[n], rng)
                        if n in leaving
                        else answer(client, asks[n])
                        for n in shuffled
                    )
                )
                for number, got in zip(shuffled, answers, strict=True):
                    assert number in leaving or got == alone[number], asks[number]

    asyncio.run(run())
    wait_until_idle(url)
