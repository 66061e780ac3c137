"""Builds of automata and decisions in separate processes, and a cache of the results."""

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
"""Limit on the cached results together, in bytes."""
_AT_ONCE = 2
"""Number of builds that run at a time. Others wait."""
MOST_WAITING = 32
"""Limit on the waiting builds. Requests for more are refused."""
COUNTS = ("constrained_requests", "automaton_builds", "automaton_build_seconds")
"""Names of metrics. Failed builds count too."""
_LONGEST_REASON = 500
"""Limit on a reason that clients get, in characters: reasons may repeat parts of a
grammar.
"""


class Wanted(Protocol):
    """Input of a build in a separate process. Equal inputs give equal bytes."""

    @property
    def build_seconds(self) -> float:
        """Limit on the build's time, in seconds of one core."""

    @property
    def about(self) -> str:
        """Start of error messages: the field, and a word for the result."""


class _Build:
    """A running or waiting build, which all requests with equal inputs share."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.future: Future[bytes] = Future()
        # An aborted request must not cancel the build for others.
        self.future.set_running_or_notify_cancel()
        self.num_waiting = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.is_abandoned = False


class _Cache:
    """Results by their inputs; the least recently used ones are dropped. Its lock
    protects it from other threads.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self.counts = dict.fromkeys(COUNTS, 0.0)
        self.kept: LRUCache[Wanted, bytes] = LRUCache(
            kept_bytes, lambda result: min(len(result), kept_bytes)
        )
        self.builds: dict[Wanted, _Build] = {}
        """Builds that run or wait for their turn."""
        self.turns: SimpleQueue[_Build] = SimpleQueue()
        """Queue of builds. Builds that nobody waits for any more stay in it."""
        self.has_threads = False
        self.lock = Lock()

    def begin(self, wanted: Wanted) -> _Build:
        """Start a new build, which runs when its turn comes."""
        if len(self.builds) >= _AT_ONCE + MOST_WAITING:
            raise RetryableRequestError(
                f"{wanted.about}: {MOST_WAITING} requests wait for their automata to "
                f"be built, and no more may; send the request again later"
            )
        build = self.builds[wanted] = _Build(wanted)
        self.turns.put(build)
        if not self.has_threads:
            self.has_threads = True
            # Not an executor, because its threads would delay the end of the program.
            for _ in range(_AT_ONCE):
                Thread(
                    target=_run_builds, args=(self,), name="automaton", daemon=True
                ).start()
        return build

    def abandon(self, build: _Build) -> None:
        """Stop a build that nobody waits for."""
        build.is_abandoned = True
        del self.builds[build.wanted]
        if build.process is not None:
            build.process.kill()

    def end(self, build: _Build, result: bytes | BaseException, seconds: float) -> None:
        """Set the result of a build for all who wait, and cache it."""
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
    """Run builds one after the other."""
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
    # In a new session, so that a signal to the server's process group does not stop the
    # build, and requests can still finish.
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
    """Count an admitted request for the metrics."""
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
    """Context with the future of a result, which is built if it is not cached. The
    build is stopped when all waiting contexts have been left, because clients may
    disconnect.

    Raises ``RetryableRequestError`` if too many builds wait.
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
    """Return True if the result is cached, so that ``built`` does not wait."""
    with _cache.lock:
        return wanted in _cache.kept


def built(wanted: Wanted) -> bytes:
    """Build an input, such as that of an automaton, wait for the result, and return its
    bytes.

    Raises:
        RetryableRequestError: too many builds wait, or the building process was killed.
        InvalidRequestError: the input is not supported, the tokenizer can spell no text,
            or a limit is exceeded.
    """
    with _awaited(wanted) as future:
        return future.result()


async def when_built(wanted: Wanted) -> bytes:
    """``built`` without blocking the event loop."""
    with _awaited(wanted) as future:
        return await asyncio.wrap_future(future)
