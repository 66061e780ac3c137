"""Automata of grammars over a tokenizer's vocabulary: built in processes of their own, and kept."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from threading import Condition, Thread

from cachetools import LRUCache
from vllm.exceptions import GenerationError, RetryableRequestError
from vllm.logger import init_logger

from dllm_engine.scheduler.constraints.automaton import Automaton, unpacked
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.structured_output.build import REFUSED, BuildInput

logger = init_logger(f"vllm.{__name__}")

_KEPT_BYTES = 256 << 20
"""Most bytes of all kept automata together."""
_AT_ONCE = 2
"""Builds that run at a time; others wait."""
MOST_WAITING = 32
"""Builds that wait; requests for more are refused."""
COUNTS = ("constrained_requests", "automaton_builds", "automaton_build_seconds", "automaton_cache_hits")
"""Names of metrics: builds are also those that failed or were ended, hits also those of calls that waited while another
call built their automaton."""
_LONGEST_REASON = 500
"""Characters of what a client is told about its grammar, which may repeat parts of it."""


class _Build:
    """An automaton that is built or waits for its turn, as long as a call waits for it."""

    def __init__(self) -> None:
        self.future: Future[Automaton] = Future()
        self.future.set_running_or_notify_cancel()  # a call that no longer waits does not cancel those of others
        self.num_calls = 0
        self.process: subprocess.Popen[bytes] | None = None

    def stop(self, error: BaseException) -> None:
        self.future.set_exception(error)
        if self.process is not None:
            self.process.kill()


class _Cache:
    """Automata by what they are made from; those used last are kept. May be used from several threads."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self.counts = dict.fromkeys(COUNTS, 0.0)
        self.kept: LRUCache[BuildInput, _Build] = LRUCache(kept_bytes, _size)
        self.builds: dict[BuildInput, _Build] = {}
        """Builds that are not finished, in their order. The first run, the others wait."""
        self.changed = Condition()

    @contextmanager
    def awaited(self, wanted: BuildInput) -> Iterator[Future[Automaton]]:
        """The automaton to be, for as long as the call waits for it. A build that no call waits for is ended."""
        with self.changed:
            build = self.kept.get(wanted) or self.builds.get(wanted)
            self.counts["automaton_cache_hits"] += build is not None
            if build is None:
                if len(self.builds) >= _AT_ONCE + MOST_WAITING:
                    raise RetryableRequestError(
                        f"structured_outputs.{wanted.grammar.kind}: {MOST_WAITING} requests wait for their automata to "
                        "be built, and no more may; send the request again later"
                    )
                build = self.builds[wanted] = _Build()
                # An executor's threads would hold up the end of the program.
                Thread(target=self._run, args=(wanted, build), name="automaton", daemon=True).start()
            build.num_calls += 1
        try:
            yield build.future
        finally:
            with self.changed:
                build.num_calls -= 1
                if not build.num_calls and not build.future.done():
                    self._stop(wanted, RuntimeError("no call waits for this automaton"))

    def _run(self, wanted: BuildInput, build: _Build) -> None:
        with self.changed:
            self.changed.wait_for(lambda: build.future.done() or build in islice(self.builds.values(), _AT_ONCE))
            if build.future.done():
                return
        start, failure = time.monotonic(), None
        try:
            automaton = _build_apart(build, wanted)
        except BaseException as error:
            failure = error
        with self.changed:
            self.counts["automaton_builds"] += 1
            self.counts["automaton_build_seconds"] += time.monotonic() - start
            if build.future.done():
                return
            if failure is None:
                build.future.set_result(automaton)
                self.kept[wanted] = build
                del self.builds[wanted]
                self.changed.notify_all()
            else:
                self._stop(wanted, failure)

    def _stop(self, wanted: BuildInput, error: BaseException) -> None:
        self.builds.pop(wanted).stop(error)
        self.changed.notify_all()

    def stop_all(self, error: BaseException) -> None:
        with self.changed:
            for wanted in list(self.builds):
                self._stop(wanted, error)


def _size(build: _Build) -> int:
    """Bytes of an automaton's tables, and as much again for ``packed`` and what that is made from."""
    automaton = build.future.result()
    tables = (automaton.class_of, automaton.next_state, automaton.accepting)
    return min(2 * sum(table.nbytes for table in tables), _KEPT_BYTES)  # one that is larger is kept alone


def _build_apart(build: _Build, wanted: BuildInput) -> Automaton:
    grammar, limits = wanted.grammar, wanted.limits
    status, answer, errors = _run_apart(build, pickle.dumps(wanted))
    if not status:
        return unpacked(answer)
    reason = f"its automaton takes over max_automaton_seconds={limits.build_seconds:g} to build"
    if status in (REFUSED, -signal.SIGXCPU, -signal.SIGALRM):
        reason = answer.decode() if status == REFUSED else reason
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[: _LONGEST_REASON // 2]} … {reason[-_LONGEST_REASON // 2 :]}"
        raise InvalidRequestError(f"structured_outputs.{grammar.kind}: {reason}")
    if status == -signal.SIGKILL:
        raise RetryableRequestError(
            f"structured_outputs.{grammar.kind}: building its automaton was ended from outside; the machine may be out "
            "of memory; send the request again later"
        )
    logger.error("building an automaton failed with exit status %d: %s", status, errors.decode(errors="replace"))
    raise GenerationError(f"structured_outputs.{grammar.kind}: building its automaton failed; the log says why")


def _run_apart(build: _Build, sent: bytes) -> tuple[int, bytes, bytes]:
    """Exit status, output and error output of the building process."""
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "dllm_engine.structured_output.build"]
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env) as process:
        build.process = process
        if build.future.done():  # stopped before there was a process to kill
            process.kill()
        output, errors = process.communicate(sent)
        return process.returncode, output, errors


_cache = _Cache()


def count_request() -> None:
    """Note for the metrics that a request was admitted."""
    with _cache.changed:
        _cache.counts["constrained_requests"] += 1


def take_counts() -> dict[str, float]:
    """Counts of this process since the last call, by name of the metric."""
    with _cache.changed:
        counts, _cache.counts = _cache.counts, dict.fromkeys(COUNTS, 0.0)
    return counts


def stop_builds(error: BaseException) -> None:
    """End all builds, with an error for whoever waits for one."""
    _cache.stop_all(error)


def awaited_automaton(wanted: BuildInput) -> AbstractContextManager[Future[Automaton]]:
    """The automaton, which is built as long as somebody is in such a context for it; may be used from several threads.

    Raises:
        RetryableRequestError: too many wait; by the future: the building process was killed.
        InvalidRequestError: by the future: the grammar is not supported, no text can be spelled, or a limit is passed.
    """
    return _cache.awaited(wanted)
