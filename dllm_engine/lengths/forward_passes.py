"""Forward passes over canvases that no step of a request has: for likelihoods of given
tokens, and for lengths.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

_WAIT_S = 0.005
"""Seconds between two looks whether the engine has other requests."""


class Probe(NamedTuple):
    """A canvas, and what is asked about it: each of ``tokens`` at the masked position
    beside it. A position may be there for several tokens."""

    canvas: list[int]
    masked: list[int]
    tokens: list[int]


class Logprobs(NamedTuple):
    """Log-probabilities of the tokens that a probe asks about, and of the likeliest
    tokens at their positions.
    """

    asked: list[float]
    likeliest: list[float]


T = TypeVar("T")
Passes = Generator[list[Probe], list[Logprobs], T]
"""Passes one after the other, and what comes of them: it yields the probes of each and
is sent their answers.
"""


def batches_of(probes: Iterable[Probe], max_rows: int) -> Iterator[list[Probe]]:
    """Probes, taken as needed, as many at once as fit into a forward pass of
    ``max_rows``.
    """
    batch: list[Probe] = []
    num_rows = 0
    for probe in probes:
        num_rows += len(probe.canvas)
        if batch and num_rows > max_rows:
            yield batch
            batch, num_rows = [], len(probe.canvas)
        batch.append(probe)
    if batch:
        yield batch


def answers_of(llm: Any, probes: Iterable[Probe]) -> Iterator[Logprobs]:
    """Answers of an offline engine to each probe, read as needed."""
    rows = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    for batch in batches_of(probes, rows):
        answers, _ = llm.collective_rpc("masked_logprobs", args=arguments_of(batch))
        if answers is None:
            raise ValueError(
                "masked_logprobs: the engine is paused or its weights are incomplete; "
                "let it go on"
            )
        for answer in answers:
            yield Logprobs(*answer)


def result_of(llm: Any, passes: Passes[T]) -> T:
    """Run passes on an offline engine and return their result."""
    answers: Any = None
    while True:
        try:
            probes = passes.send(answers)
        except StopIteration as end:
            return end.value
        answers = list(answers_of(llm, probes))


def arguments_of(probes: list[Probe]) -> tuple[Any, ...]:
    """Arguments of the workers' ``masked_logprobs``."""
    return tuple(map(list, zip(*probes, strict=True)))


class ForwardPasses:
    """Forward passes of a server's engine. What waits is computed together, as much as
    fits, in the order in which it came. Between two passes the engine's steps have as
    much time as a pass took."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._max_rows = engine.vllm_config.scheduler_config.max_num_batched_tokens
        self._waiting: deque[tuple[list[Probe], asyncio.Future[Any]]] = deque()
        self._running: asyncio.Task[None] | None = None
        self._steps_until = 0.0
        """When the next pass may begin, if the engine has other requests."""

    async def answers(self, probes: Iterable[Probe]) -> AsyncIterator[Logprobs]:
        """Answers to each probe, all by the same weights, or else an ``HTTPException``."""
        changes_before = None
        for batch in batches_of(probes, self._max_rows):
            answers, changes = await self._answered(batch)
            if answers is None or changes_before not in (None, changes):
                from fastapi import HTTPException  # takes half a second

                raise HTTPException(
                    503, "the engine is paused, or its weights changed; ask again"
                )
            changes_before = changes
            for answer in answers:
                yield Logprobs(*answer)

    async def result(self, passes: Passes[T]) -> T:
        """Run passes and return their result; raises as ``answers``."""
        answers: Any = None
        while True:
            try:
                probes = passes.send(answers)
            except StopIteration as end:
                return end.value
            answers = [answer async for answer in self.answers(probes)]

    async def _answered(self, batch: list[Probe]) -> tuple[Any, int]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append((batch, future))
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._run())
        return await future

    async def _run(self) -> None:
        """Passes until nothing waits. A pass ends when the engine has answered, also
        where the client has gone before.
        """
        while self._waiting:
            if (
                self._engine.output_processor.has_unfinished_requests()
                and time.monotonic() < self._steps_until
            ):
                await asyncio.sleep(_WAIT_S)
                continue
            taken = self._taken()
            if taken:
                begin = time.monotonic()
                await self._one_pass(taken)
                now = time.monotonic()
                self._steps_until = now + (now - begin)

    def _taken(self) -> list[tuple[list[Probe], "asyncio.Future[Any]"]]:
        """The next pass, for clients that have not gone."""
        taken: list[tuple[list[Probe], asyncio.Future[Any]]] = []
        num_rows = 0
        while self._waiting:
            batch, future = self._waiting[0]
            size = sum(len(probe.canvas) for probe in batch)
            if not future.done():
                if taken and num_rows + size > self._max_rows:
                    break
                num_rows += size
                taken.append((batch, future))
            self._waiting.popleft()
        return taken

    async def _one_pass(
        self, taken: list[tuple[list[Probe], "asyncio.Future[Any]"]]
    ) -> None:
        probes = [probe for batch, _ in taken for probe in batch]
        try:
            answers, changes = await self._engine.collective_rpc(
                "masked_logprobs", args=arguments_of(probes)
            )
        except BaseException as error:
            for _, future in taken:
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        remaining = iter(answers or ())
        for batch, future in taken:
            own = None if answers is None else [*islice(remaining, len(batch))]
            if not future.done():
                future.set_result((own, changes))


_passes: WeakKeyDictionary[Any, ForwardPasses] = WeakKeyDictionary()


def passes_of(engine: Any) -> ForwardPasses:
    """The passes of a server's engine."""
    if engine not in _passes:
        _passes[engine] = ForwardPasses(engine)
    return _passes[engine]
