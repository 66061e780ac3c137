"""Automata of grammars over a tokenizer's vocabulary: built in processes of their own, and kept."""

import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, Semaphore, Thread

from cachetools import LRUCache
from vllm.exceptions import GenerationError, RetryableRequestError
from vllm.logger import init_logger

from dllm_engine.scheduler.constraints.constraint import Automaton, unpacked
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.structured_output.build import REFUSED, BuildInput

logger = init_logger(f"vllm.{__name__}")

_KEPT_BYTES = 256 << 20
"""Most bytes of all kept automata together."""
_AT_ONCE = 2
"""Builds that run at a time; others wait."""
MOST_WAITING = 32
"""Builds that wait; requests for more are refused."""
COUNTS = ("constrained_requests", "automaton_builds", "automaton_build_seconds")
"""Names of metrics; builds are also those that failed."""
_LONGEST_REASON = 500
"""Characters of what a client is told about its grammar, which may repeat parts of it."""


class _Cache:
    """Automata by what they are made from; those used last are kept. Threads take its lock."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self.counts = dict.fromkeys(COUNTS, 0.0)
        self.kept: LRUCache[BuildInput, Future[Automaton]] = LRUCache(kept_bytes, _size)
        self.builds: dict[BuildInput, Future[Automaton]] = {}
        """Builds that run or wait for their turn."""
        self.lock = Lock()
        self.turn = Semaphore(_AT_ONCE)


def _size(future: Future[Automaton]) -> int:
    """Bytes of an automaton's tables, and as much again for ``packed`` and what that is made from."""
    automaton = future.result()
    tables = (automaton.class_of, automaton.next_state, automaton.accepting)
    return min(2 * sum(table.nbytes for table in tables), _KEPT_BYTES)  # one that is larger is kept alone


def _build_apart(wanted: BuildInput) -> Automaton:
    grammar, process = wanted.grammar, _run_apart(pickle.dumps(wanted))
    if not (status := process.returncode):
        return unpacked(process.stdout)
    reason = f"its automaton takes over max_automaton_seconds={wanted.build_seconds:g} to build"
    if status in (REFUSED, -signal.SIGXCPU, -signal.SIGALRM):
        reason = process.stdout.decode() if status == REFUSED else reason
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[: _LONGEST_REASON // 2]} … {reason[-_LONGEST_REASON // 2 :]}"
        raise InvalidRequestError(f"structured_outputs.{grammar.kind}: {reason}")
    if status == -signal.SIGKILL:
        raise RetryableRequestError(
            f"structured_outputs.{grammar.kind}: building its automaton was ended from outside; the machine may be out "
            "of memory; send the request again later"
        )
    errors = process.stderr.decode(errors="replace")
    logger.error("building an automaton failed with exit status %d: %s", status, errors)
    raise GenerationError(f"structured_outputs.{grammar.kind}: building its automaton failed; the log says why")


def _run_apart(sent: bytes) -> subprocess.CompletedProcess[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "dllm_engine.structured_output.build"]
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, input=sent, capture_output=True, env=env, check=False)


_cache = _Cache()


def count_request() -> None:
    """Note for the metrics that a request was admitted."""
    with _cache.lock:
        _cache.counts["constrained_requests"] += 1


def take_counts() -> dict[str, float]:
    """Counts of this process since the last call, by name of the metric."""
    with _cache.lock:
        counts, _cache.counts = _cache.counts, dict.fromkeys(COUNTS, 0.0)
    return counts


def automaton(wanted: BuildInput) -> Future[Automaton]:
    """The automaton, which is built if it is not kept; may be called from several threads.

    Raises:
        RetryableRequestError: too many wait; by the future: the building process was killed.
        InvalidRequestError: by the future: the grammar is not supported, no text can be spelled, or a limit is passed.
    """
    cache = _cache
    with cache.lock:
        future = cache.kept.get(wanted) or cache.builds.get(wanted)
        if future is None:
            if len(cache.builds) >= _AT_ONCE + MOST_WAITING:
                raise RetryableRequestError(
                    f"structured_outputs.{wanted.grammar.kind}: {MOST_WAITING} requests wait for their automata to "
                    "be built, and no more may; send the request again later"
                )
            future = cache.builds[wanted] = Future()
            future.set_running_or_notify_cancel()  # a request that is aborted does not cancel those of others
            # An executor's threads would hold up the end of the program.
            Thread(target=_build, args=(cache, wanted, future), name="automaton", daemon=True).start()
        return future


def _build(cache: _Cache, wanted: BuildInput, future: Future[Automaton]) -> None:
    with cache.turn:
        start, failure = time.monotonic(), None
        try:
            automaton = _build_apart(wanted)
        except BaseException as error:
            failure = error
    with cache.lock:
        cache.counts["automaton_builds"] += 1
        cache.counts["automaton_build_seconds"] += time.monotonic() - start
        del cache.builds[wanted]
        if failure is None:
            future.set_result(automaton)
            cache.kept[wanted] = future
        else:
            future.set_exception(failure)
