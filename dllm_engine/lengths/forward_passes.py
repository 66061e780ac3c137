"""Probes of an engine: for likelihoods of given tokens, and for lengths."""

import asyncio
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from typing import Any, TypeVar
from uuid import uuid4

from vllm.exceptions import RetryableRequestError

from dllm_engine.decoding.probe import Logprobs, Probe

T = TypeVar("T")
Passes = Generator[list[Probe], list[Logprobs], T]
"""Passes one after the other. The generator yields the probes of a pass, is sent their
answers, and returns a result.
"""


def batches_of(probes: Iterable[Probe], max_rows: int) -> Iterator[list[Probe]]:
    """Batches of as many probes as fit into a forward pass of ``max_rows``. Probes are
    read as needed.
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
        answers, _ = llm.collective_rpc("masked_logprobs", args=_arguments(batch))
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


async def served_answers(
    engine: Any, probes: Iterable[Probe]
) -> AsyncIterator[Logprobs]:
    """Answers of a server's engine to each probe. The engine computes them in the steps
    of its requests. Raises ``RetryableRequestError`` if it is paused or its weights change.
    """
    rows = engine.vllm_config.scheduler_config.max_num_batched_tokens
    changes_before = None
    for batch in batches_of(probes, rows):
        name, *_ = arguments = _arguments(batch)
        try:
            answers, changes = await engine.collective_rpc(
                "masked_logprobs", args=arguments
            )
        except asyncio.CancelledError:
            await engine.collective_rpc("drop_probes", args=(name,))
            raise
        if answers is None or changes_before not in (None, changes):
            raise RetryableRequestError(
                "the engine is paused, or its weights changed; ask again"
            )
        changes_before = changes
        for answer in answers:
            yield Logprobs(*answer)


async def served_result(engine: Any, passes: Passes[T]) -> T:
    """Run passes on a server's engine and return their result; raises as
    ``served_answers``.
    """
    answers: Any = None
    while True:
        try:
            probes = passes.send(answers)
        except StopIteration as end:
            return end.value
        answers = [answer async for answer in served_answers(engine, probes)]


def _arguments(probes: list[Probe]) -> tuple[Any, ...]:
    """Arguments of the call ``masked_logprobs``: its name, and lists of the fields of
    probes.
    """
    return uuid4().hex, *map(list, zip(*probes, strict=True))
