"""Engines of two tensor-parallel ranks, under vLLM's executors; the scheduler is in
this process.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from dllm_engine import LLM
from tests.support.engines import scheduler_of, start_engine


def import_once() -> Any:
    """A context whose processes are forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.imported"])
    return context


@contextmanager
def two_ranks(
    model: Path | str, *, backend: str = "mp", **settings: Any
) -> Iterator[LLM]:
    """An engine of two ranks, ended afterwards; no page is written beyond what is
    reserved, and none is left. vLLM would spawn each worker and let it import
    everything anew; here they are forked from a process that has."""
    ranks = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": backend,
        "max_model_len": 512,
    }
    with mock.patch("vllm.v1.executor.multiproc_executor.get_mp_context", import_once):
        llm = start_engine(model, **(ranks | settings))
    pages = watch_pages(llm)
    try:
        yield llm
        assert all(
            allocated <= reserved <= planned for planned, allocated, reserved in pages
        )
        assert pages[-1][1:] == (0, 0)
    finally:
        llm.llm_engine.engine_core.engine_core.model_executor.shutdown()


def watch_pages(llm: LLM) -> list[tuple[int, int, int]]:
    """Pages reserved while a step runs, and allocated and reserved after it, as the
    engine runs.
    """
    scheduler, seen = scheduler_of(llm), []
    update = scheduler.update_from_output
    pages = scheduler.pages

    def counting(*args):
        planned = pages.num_reserved
        outputs = update(*args)
        seen.append((planned, pages.num_allocated, pages.num_reserved))
        return outputs

    scheduler.update_from_output = counting
    return seen


def assert_alike(answers: list[Any], expected: list[Any], *figures: str) -> None:
    """Two lists of outputs have the same tokens, and the same figures
    of these names.
    """
    for number, (answer, other) in enumerate(zip(answers, expected, strict=True)):
        one, another = answer.outputs[0], other.outputs[0]
        assert list(one.token_ids) == list(another.token_ids), number
        for name in figures:
            assert getattr(one.diffusion, name) == getattr(another.diffusion, name), (
                number,
                name,
            )


def run_and_abort(llm: LLM, prompts: list[list[int]], params: list[Any]) -> None:
    names = [f"aborted {number}" for number in range(len(prompts))]
    for name, prompt, asked in zip(names, prompts, params, strict=True):
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, asked)
    for _ in range(2):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(names)
