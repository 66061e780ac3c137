"""Clients that put a server under load: they ask all kinds of things, and a fifth of them hangs up midway.

First every request is asked alone. Then the clients ask them at random, with the real OpenAI client. Violations are: an
error that was not asked for, an answer other than the one given alone (so no token of one request is in another), no
answer in time, and something left running or in pages at the end.
"""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from dllm_engine.demo.tasks import TASKS, make_examples
from tests.support.server import scrape

NUM_CLIENTS = 16
HANG_UPS = 0.2
REQUEST_TIMEOUT_S = 60.0
SERVER = (
    *("serve", "demo", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "12"),
    *("--cache-method", "sparse", "--page-size", "8"),
)
LEFT = (
    "vllm:dllm_pages_reserved",
    "vllm:dllm_pages_allocated",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)
"""What is 0 on ``/metrics`` where nothing is left."""


@dataclass(frozen=True)
class Ask:
    """One request; ``refused`` if it must be answered with 400."""

    chat: bool
    arguments: dict[str, Any]
    refused: bool


def draw_asks(count: int, seed: int) -> list[Ask]:
    """Requests of random endpoints, lengths and options."""
    rng = random.Random(seed)
    return [_draw(rng) for _ in range(count)]


def _draw(rng: random.Random) -> Ask:
    prompt = make_examples(rng.choice(TASKS), 1, seed=rng.randrange(1_000_000))[0].prompt
    chat, refused = rng.random() < 0.5, rng.random() < 0.05
    length = rng.choice([8, 16, 24, 32, 48, 64])
    decodings: list[dict[str, Any]] = [
        {}, {"block_length": 8}, {"block_length": 8, "steps": length // 2}, {"threshold": 0.9, "block_length": 8},
        {"factor": 0.5}, {"retention_ratio": 0.25, "block_length": 8}, {"unmasking": "random", "block_length": 4},
    ]  # fmt: skip
    extra: dict[str, Any] = rng.choice(decodings)
    arguments: dict[str, Any] = {"model": "demo", "max_tokens": length, "stream": rng.random() < 0.5}
    arguments["seed"] = rng.randrange(1000)
    arguments |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    if rng.random() < 0.4:
        arguments |= {"temperature": 1.0, "n": rng.choice([1, 2, 3])}
    if rng.random() < 0.2:
        arguments["stop"] = rng.choice([",", ["=", "."], "e"])
    if rng.random() < 0.2:
        arguments |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    if arguments["stream"] and rng.random() < 0.3:
        extra = extra | {"stream_granularity": "step"}
    if refused:
        extra = extra | rng.choice([{"steps": 0}, {"stepz": 1}, {"block_length": length + 1}, {"retention_ratio": 0.9}])
    arguments["extra_body"] = {"vllm_xargs": extra, "ignore_eos": rng.random() < 0.5}
    return Ask(chat, arguments, refused)


Answer = dict[int, tuple[str, str | None]]
"""Text and reason of the end, by the number of the choice."""


async def answer(client: openai.AsyncOpenAI, ask: Ask, chunks: float = float("inf")) -> Answer:
    """The answer of the server; of a stream at most ``chunks``, then the client hangs up."""
    create: Any = client.chat.completions.create if ask.chat else client.completions.create
    response = await create(**ask.arguments)
    if not ask.arguments["stream"]:
        return {c.index: (c.message.content if ask.chat else c.text, c.finish_reason) for c in response.choices}
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    received = 0
    try:
        async for chunk in response:
            for choice in chunk.choices:
                text = (choice.delta.content if ask.chat else choice.text) or ""
                texts[choice.index] = texts.get(choice.index, "") + text
                reasons[choice.index] = choice.finish_reason
            received += 1
            if received >= chunks:
                break
    finally:
        await response.close()
    return {index: (text, reasons[index]) for index, text in texts.items()}


class Load:
    """Clients that ask ``asks`` of the server at ``url``."""

    def __init__(self, url: str, asks: list[Ask], seed: int) -> None:
        self.url, self.asks, self.rng = url, asks, random.Random(seed)
        self.alone: list[Answer | None] = []
        """The answer to each when it is asked alone; None: refused."""
        self.outcomes: Counter[str] = Counter()
        self.violations: list[str] = []

    def _violated(self, ask: Ask, what: str) -> None:
        self.violations.append(f"{what}, asked {json.dumps(ask.arguments)}")

    def _client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S)

    async def run(self, num_clients: int, seconds: float) -> None:
        """Load the server for ``seconds``; the first time after asking everything alone."""
        if not self.alone:
            async with self._client() as client:
                for ask in self.asks:
                    self.alone.append(await self._answer(client, ask))
        deadline = time.monotonic() + seconds
        work = [self._ask_until(deadline) for _ in range(num_clients)]
        await asyncio.wait_for(asyncio.gather(*work), seconds + 2 * REQUEST_TIMEOUT_S)
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while left := {name: value for name, value in scrape(self.url).items() if name in LEFT and value}:
            if time.monotonic() > deadline:
                self.violations.append(f"left at the end: {left}")
                return
            await asyncio.sleep(0.5)

    async def _ask_until(self, deadline: float) -> None:
        async with self._client() as client:
            while time.monotonic() < deadline:
                number = self.rng.randrange(len(self.asks))
                if self.rng.random() < HANG_UPS:
                    self.outcomes["hung up"] += await self._hang_up(client, self.asks[number])
                    continue
                got = await self._answer(client, self.asks[number])
                self.outcomes["refused" if got is None else "answered"] += 1
                if got != self.alone[number]:
                    self._violated(self.asks[number], f"answered {got}, alone {self.alone[number]}")

    async def _answer(self, client: openai.AsyncOpenAI, ask: Ask) -> Answer | None:
        """None: refused, or nothing that an answer could be compared with."""
        try:
            got = await asyncio.wait_for(answer(client, ask), REQUEST_TIMEOUT_S)
        except openai.BadRequestError as error:
            if not ask.refused:
                self._violated(ask, f"refused: {error}")
        except (TimeoutError, openai.OpenAIError, httpx.HTTPError) as error:
            self._violated(ask, repr(error))
        else:
            if ask.refused:
                self._violated(ask, "answered instead of refused")
            return got
        return None

    async def _hang_up(self, client: openai.AsyncOpenAI, ask: Ask) -> bool:
        """Go after some chunks of a stream, or some time. Whether there was something to hang up on."""
        is_stream = ask.arguments["stream"]
        chunks, seconds = self.rng.randint(1, 4), self.rng.uniform(0.01, 0.5)
        try:
            await asyncio.wait_for(answer(client, ask, chunks), REQUEST_TIMEOUT_S if is_stream else seconds)
        except TimeoutError:
            return True
        except (openai.OpenAIError, httpx.HTTPError) as error:
            if not ask.refused or not isinstance(error, openai.BadRequestError):
                self._violated(ask, repr(error))
            return False
        return bool(is_stream)
