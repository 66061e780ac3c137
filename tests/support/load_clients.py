"""Clients that put a server under load: they ask all kinds of things, and a fifth of them hangs up midway.

First every request is asked alone. Then the clients ask them at random, with the real OpenAI client. Violations are: an
error that was not asked for, an answer other than the one given alone (so no token of one request is in another), no
answer in time, something left running or in pages at the end, and memory of the server's processes that grew by 3% or
more after the warm-up (the first fifth; libraries fill their buffers for a minute or two, so shorter runs say nothing
of memory).
"""

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import psutil

from dllm_engine.demo.tasks import TASKS, make_examples
from tests.support.server import scrape

NUM_CLIENTS = 16
NUM_ASKS = 160
HANG_UPS = 0.2
REQUEST_TIMEOUT_S = 60.0
WARM_UP = 0.2
"""Part of the time after which memory must not grow."""
ALLOWED_GROWTH = 0.03
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


@dataclass
class Report:
    """What became of a load."""

    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    """MiB of all processes of the server, at equal intervals."""

    def violated(self, ask: Ask, what: str) -> None:
        self.violations.append(f"{what}, asked {json.dumps(ask.arguments)}")

    @property
    def memory_growth(self) -> float:
        """Of the last tenth of the time over the first one after the warm-up."""
        after = self.memory[int(len(self.memory) * WARM_UP) :]
        tenth = max(len(self.memory) // 10, 1)
        return statistics.median(after[-tenth:]) / statistics.median(after[:tenth]) - 1


class Load:
    """Clients that ask ``asks`` of the server at ``url``."""

    def __init__(self, url: str, asks: list[Ask], seed: int) -> None:
        self.url = url
        self.asks = asks
        self.rng = random.Random(seed)
        self.alone: list[Answer | None] = []
        self.report = Report()

    def _client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S)

    async def ask_alone(self) -> None:
        """Ask one request after the other, to know their answers."""
        async with self._client() as client:
            for ask in self.asks:
                try:
                    self.alone.append(await asyncio.wait_for(answer(client, ask), REQUEST_TIMEOUT_S))
                    if ask.refused:
                        self.report.violated(ask, "answered instead of refused")
                except openai.BadRequestError as error:
                    self.alone.append(None)
                    if not ask.refused:
                        self.report.violated(ask, f"refused: {error}")

    async def _ask_one(self, client: openai.AsyncOpenAI) -> str:
        """Ask one of the requests at random; says what came of it."""
        number = self.rng.randrange(len(self.asks))
        ask, expected = self.asks[number], self.alone[number]
        hangs_up = self.rng.random() < HANG_UPS
        try:
            if not hangs_up:
                got = await asyncio.wait_for(answer(client, ask), REQUEST_TIMEOUT_S)
            elif ask.arguments["stream"]:
                await asyncio.wait_for(answer(client, ask, self.rng.randint(1, 4)), REQUEST_TIMEOUT_S)
                return "hung up"
            else:
                got = await asyncio.wait_for(answer(client, ask), self.rng.uniform(0.01, 0.5))
        except openai.BadRequestError as error:
            if not ask.refused:
                self.report.violated(ask, f"refused: {error}")
            return "refused"
        except TimeoutError:
            if hangs_up:
                return "hung up"
            self.report.violated(ask, f"no answer in {REQUEST_TIMEOUT_S} s")
            return "failed"
        except (openai.OpenAIError, httpx.HTTPError) as error:
            self.report.violated(ask, f"{type(error).__name__}: {error}")
            return "failed"
        if got != expected:
            self.report.violated(ask, f"answered {got}, alone {expected}")
        return "answered"

    async def _ask_until(self, deadline: float) -> None:
        async with self._client() as client:
            while time.monotonic() < deadline:
                self.report.outcomes[await self._ask_one(client)] += 1

    async def _watch_memory(self, pid: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.report.memory.append(memory_of_processes(pid) / (1 << 20))
            await asyncio.sleep(max(seconds / 100, 0.2))

    async def run(self, num_clients: int, seconds: float, pid: int | None) -> Report:
        """Load the server for ``seconds``; the first time after asking everything alone."""
        if not self.alone:
            await self.ask_alone()
        deadline = time.monotonic() + seconds
        work = [self._ask_until(deadline) for _ in range(num_clients)]
        if pid is not None:
            work.append(self._watch_memory(pid, seconds))
        await asyncio.wait_for(asyncio.gather(*work), seconds + 2 * REQUEST_TIMEOUT_S)
        await self._check_nothing_is_left()
        if pid is not None and self.report.memory_growth >= ALLOWED_GROWTH:
            self.report.violations.append(f"memory grew by {self.report.memory_growth:.1%} after the warm-up")
        return self.report

    async def _check_nothing_is_left(self) -> None:
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        left: dict[str, float] = {}
        while time.monotonic() < deadline:
            values = await asyncio.to_thread(scrape, self.url)
            left = {name: values[name] for name in LEFT if values[name]}
            if not left:
                return
            await asyncio.sleep(0.5)
        self.report.violations.append(f"left at the end: {left}")


def memory_of_processes(pid: int) -> int:
    """Resident bytes of a process and of all that it started."""
    process = psutil.Process(pid)
    return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
