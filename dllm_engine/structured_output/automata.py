"""Automata of grammars over a tokenizer's vocabulary, and decisions: built in processes
of their own, and kept.
"""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Protocol

from cachetools import LRUCache
from vllm.exceptions import GenerationError, RetryableRequestError
from vllm.logger import init_logger

from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.structured_output.build import REFUSED

logger = init_logger(f"vllm.{__name__}")

_KEPT_BYTES = 256 << 20
"""Most bytes of all that is kept together."""
_AT_ONCE = 2
"""Builds that run at a time; others wait."""
MOST_WAITING = 32
"""Builds that wait; requests for more are refused."""
COUNTS = ("constrained_requests", "automaton_builds", "automaton_build_seconds")
"""Names of metrics; builds are also those that failed."""
_LONGEST_REASON = 500
"""Characters of what a client is told about its grammar, which may repeat parts of it.
"""


class Wanted(Protocol):
    """An input from which a process of its own makes bytes; equal inputs make equal
    ones.
    """

    @property
    def build_seconds(self) -> float:
        """Seconds of one core that building it may take."""

    @property
    def about(self) -> str:
        """The field that an error names, and a word for what is built."""


class _Build:
    """A build that runs or waits for its turn, for all requests that wait for it."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.future: Future[bytes] = Future()
        # A request that is aborted does not cancel those of others.
        self.future.set_running_or_notify_cancel()
        self.num_waiting = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.is_abandoned = False


class _Cache:
    """Results by what they are made from; those used last are kept. Threads take its
    lock.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self.counts = dict.fromkeys(COUNTS, 0.0)
        self.kept: LRUCache[Wanted, bytes] = LRUCache(
            kept_bytes, lambda result: min(len(result), kept_bytes)
        )
        self.builds: dict[Wanted, _Build] = {}
        """Builds that run or wait for their turn."""
        self.turns: SimpleQueue[_Build] = SimpleQueue()
        """Builds whose turn comes, and those of them that nobody waits for any more."""
        self.has_threads = False
        self.lock = Lock()

    def begin(self, wanted: Wanted) -> _Build:
        """A new build, which runs when it is its turn."""
        if len(self.builds) >= _AT_ONCE + MOST_WAITING:
            raise RetryableRequestError(
                f"{wanted.about}: {MOST_WAITING} requests wait for their automata to "
                f"be built, and no more may; send the request again later"
            )
        build = self.builds[wanted] = _Build(wanted)
        self.turns.put(build)
        if not self.has_threads:
            self.has_threads = True
            # An executor's threads would hold up the end of the program.
            for _ in range(_AT_ONCE):
                Thread(
                    target=_run_builds, args=(self,), name="automaton", daemon=True
                ).start()
        return build

    def abandon(self, build: _Build) -> None:
        """End a build that nobody waits for."""
        build.is_abandoned = True
        del self.builds[build.wanted]
        if build.process is not None:
            build.process.kill()

    def end(self, build: _Build, result: bytes | BaseException, seconds: float) -> None:
        """Tell all who wait what a build came to, and keep its result."""
        with self.lock:
            self.counts["automaton_builds"] += 1
            self.counts["automaton_build_seconds"] += seconds
            if not build.is_abandoned:
                del self.builds[build.wanted]
            if isinstance(result, BaseException):
                build.future.set_exception(result)
                return
            self.kept[build.wanted] = result
            build.future.set_result(result)


def _run_builds(cache: _Cache) -> None:
    """Build what is wanted, one after the other."""
    while True:
        build = cache.turns.get()
        if build.is_abandoned:
            continue
        start = time.monotonic()
        result: bytes | BaseException
        try:
            result = _build_apart(cache, build)
        except BaseException as error:
            result = error
        cache.end(build, result, time.monotonic() - start)


def _build_apart(cache: _Cache, build: _Build) -> bytes:
    wanted = build.wanted
    process = _run_apart(cache, build)
    if not (status := process.returncode):
        return process.stdout
    if status in (-signal.SIGXCPU, -signal.SIGALRM):
        raise InvalidRequestError(
            f"{wanted.about} takes over max_automaton_seconds={wanted.build_seconds:g} "
            f"to build"
        )
    if status == REFUSED:
        reason = process.stdout.decode()
        if len(reason) > _LONGEST_REASON:
            reason = (
                f"{reason[: _LONGEST_REASON // 2]} … {reason[-_LONGEST_REASON // 2 :]}"
            )
        raise InvalidRequestError(reason)
    if status == -signal.SIGKILL:
        raise RetryableRequestError(
            f"{wanted.about}: the process that builds it was ended from outside; the "
            f"machine may be out of memory; send the request again later"
        )
    errors = process.stderr.decode(errors="replace")
    logger.error("building failed with exit status %d: %s", status, errors)
    raise GenerationError(f"{wanted.about}: building it failed; the log says why")


def _run_apart(cache: _Cache, build: _Build) -> subprocess.CompletedProcess[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "dllm_engine.structured_output.build"]
    one_core = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    env = {**os.environ, "PYTHONPATH": paths, **one_core}
    sent = pickle.dumps(build.wanted)
    pipe = subprocess.PIPE
    # In a session of its own, so that a server that is stopped by a signal to all
    # processes of its group can still finish requests.
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True
    ) as process:
        with cache.lock:
            build.process = process
            if build.is_abandoned:
                process.kill()
        stdout, stderr = process.communicate(sent)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


_cache = _Cache()


def count_request() -> None:
    """Note for the metrics that a request was admitted."""
    with _cache.lock:
        _cache.counts["constrained_requests"] += 1


def take_counts() -> dict[str, float]:
    """Counts of this process since the last call, by name of the metric."""
    with _cache.lock:
        counts = _cache.counts
        _cache.counts = dict.fromkeys(COUNTS, 0.0)
    return counts


@contextmanager
def _awaited(wanted: Wanted) -> Iterator[Future[bytes]]:
    """The future of a result, for a block that waits for it. What is not kept is built.
    A build ends when all have left their blocks: its client may have gone.

    Raises ``RetryableRequestError`` where too many builds wait.
    """
    cache = _cache
    with cache.lock:
        if (kept := cache.kept.get(wanted)) is None:
            build = cache.builds.get(wanted) or cache.begin(wanted)
            build.num_waiting += 1
    if kept is not None:
        future: Future[bytes] = Future()
        future.set_result(kept)
        yield future
        return
    try:
        yield build.future
    finally:
        with cache.lock:
            build.num_waiting -= 1
            if not build.num_waiting and not build.future.done():
                cache.abandon(build)


def is_kept(wanted: Wanted) -> bool:
    """Return True if ``built`` need not wait."""
    with _cache.lock:
        return wanted in _cache.kept


def built(wanted: Wanted) -> bytes:
    """Build what is wanted, such as a packed automaton, and wait until it is built.

    Raises:
        RetryableRequestError: too many builds wait, or the building process was killed.
        InvalidRequestError: it is not supported, no text can be spelled, or a limit is
        passed.
    """
    with _awaited(wanted) as future:
        return future.result()


async def when_built(wanted: Wanted) -> bytes:
    """Call ``built`` without holding up the event loop."""
    with _awaited(wanted) as future:
        return await asyncio.wrap_future(future)
