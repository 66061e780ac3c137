"""Automata of grammars over a tokenizer's vocabulary: built in processes of their own, and kept."""

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Lock, Thread
from weakref import WeakKeyDictionary

from vllm.exceptions import GenerationError, RetryableRequestError
from vllm.logger import init_logger
from vllm.tokenizers import TokenizerLike

from dllm_engine.scheduler.constraints.automaton import Automaton, unpacked
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.structured_output.build import BUILT, Grammar, Limits
from dllm_engine.structured_output.vocabulary import Vocabulary, vocabulary_of

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
_PATIENCE = 10
"""A busy machine gives a build less than a core: it is ended after as many times ``build_seconds``."""
_LONGEST_REASON = 500
"""Characters of what a client is told about its grammar, which may repeat parts of it."""


class _Build:
    """One automaton: built, or waiting for its turn, as long as a call waits for it; or finished."""

    def __init__(self, key: object) -> None:
        self.key = key
        self.size: int | None = None
        """Bytes, when it is finished."""
        self.future: Future[Automaton] = Future()
        self.future.set_running_or_notify_cancel()  # a call that no longer waits does not cancel those of others
        self.num_calls = 0
        self.is_stopped = False
        self._process: subprocess.Popen[bytes] | None = None

    def stop(self) -> None:
        self.is_stopped = True
        if self._process is not None:
            self._process.kill()

    def run(self, command: list[str], sent: bytes, timeout: float, env: dict[str, str]) -> tuple[int, bytes, bytes]:
        """Exit status, output and error output of the building process."""
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env) as process:
            self._process = process
            if self.is_stopped:  # before there was a process to kill
                process.kill()
            try:
                output, errors = process.communicate(sent, timeout)
                return process.returncode, output, errors
            except subprocess.TimeoutExpired:
                process.kill()
                return -signal.SIGXCPU, b"", b""


class _Cache:
    """Automata by what they are made from; those used last are kept. May be used from several threads."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.counts = dict.fromkeys(COUNTS, 0.0)
        self.builds: OrderedDict[object, _Build] = OrderedDict()
        self.waiting: OrderedDict[_Build, tuple[Grammar, Vocabulary, Limits]] = OrderedDict()
        self.num_running = 0
        self.vocabularies: WeakKeyDictionary[TokenizerLike, dict[int, Vocabulary]] = WeakKeyDictionary()

    def vocabulary(self, tokenizer: TokenizerLike | None, vocab_size: int) -> Vocabulary:
        with self.lock:
            by_size = {} if tokenizer is None else self.vocabularies.setdefault(tokenizer, {})
        if vocab_size not in by_size:  # two threads may both read it: they read the same
            by_size[vocab_size] = vocabulary_of(tokenizer, vocab_size)
        return by_size[vocab_size]

    @contextmanager
    def awaited(self, grammar: Grammar, vocabulary: Vocabulary, limits: Limits) -> Iterator[Future[Automaton]]:
        """The automaton to be, for as long as the call waits for it. A build that no call waits for is ended."""
        key = (grammar, vocabulary.digest, limits)
        with self.lock:
            build = self.builds.get(key)
            if build is not None:
                self.builds.move_to_end(key)
                self.counts["automaton_cache_hits"] += 1
            elif len(self.waiting) >= MOST_WAITING:
                raise RetryableRequestError(
                    f"structured_outputs.{grammar.kind}: {MOST_WAITING} requests wait for their automata to be built, "
                    "and no more may; send the request again later"
                )
            else:
                build = self.builds[key] = _Build(key)
                self.waiting[build] = (grammar, vocabulary, limits)
            build.num_calls += 1
        self._start_next()
        try:
            yield build.future
        finally:
            with self.lock:
                build.num_calls -= 1
                if not build.num_calls and build.size is None:
                    self._forget(build)
                    build.stop()

    def _start_next(self) -> None:
        with self.lock:
            if not self.waiting or self.num_running == _AT_ONCE:
                return
            self.num_running += 1
            work = self.waiting.popitem(last=False)
        # An executor's threads would hold up the end of the program.
        Thread(target=self._run, args=work, name="automaton", daemon=True).start()

    def _run(self, build: _Build, work: tuple[Grammar, Vocabulary, Limits]) -> None:
        start, automaton, failure = time.monotonic(), None, None
        try:
            automaton = _build_apart(build, *work)
        except BaseException as error:
            failure = error
        with self.lock:
            self.num_running -= 1
            self.counts["automaton_builds"] += 1
            self.counts["automaton_build_seconds"] += time.monotonic() - start
            if automaton is None:
                self._forget(build)
            else:
                build.size = _size(automaton)
                self._let_go()
        if automaton is None:
            build.future.set_exception(failure)
        else:
            build.future.set_result(automaton)
        self._start_next()

    def _forget(self, build: _Build) -> None:
        self.waiting.pop(build, None)
        if self.builds.get(build.key) is build:
            del self.builds[build.key]

    def _let_go(self) -> None:
        finished = [build for build in self.builds.values() if build.size is not None]
        total = sum(build.size or 0 for build in finished)
        for build in finished[:-1]:
            if total <= _KEPT_BYTES:
                break
            total -= build.size or 0
            del self.builds[build.key]


def _size(automaton: Automaton) -> int:
    """Its tables, and as much again for ``packed`` and what that is made from."""
    return 2 * sum(table.nbytes for table in (automaton.class_of, automaton.next_state, automaton.accepting))


def _build_apart(build: _Build, grammar: Grammar, vocabulary: Vocabulary, limits: Limits) -> Automaton:
    seconds = math.ceil(limits.build_seconds)
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    status, answer, errors = build.run(
        [sys.executable, "-P", "-m", "dllm_engine.structured_output.build"],
        pickle.dumps((grammar, limits, vocabulary.token_bytes, vocabulary.starts)),
        _PATIENCE * seconds,
        {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    if status == -signal.SIGXCPU:
        raise _failed(grammar, f"its automaton takes over max_automaton_seconds={limits.build_seconds:g} to build")
    if status == -signal.SIGKILL:
        raise RetryableRequestError(
            f"structured_outputs.{grammar.kind}: building its automaton was ended from outside; the machine may be out "
            "of memory; send the request again later"
        )
    if status:
        logger.error("building an automaton failed with exit status %d: %s", status, errors.decode(errors="replace"))
        raise GenerationError(f"structured_outputs.{grammar.kind}: building its automaton failed; the log says why")
    if answer[:1] != BUILT:
        raise _failed(grammar, answer[1:].decode())
    return unpacked(answer[1:])


def _failed(grammar: Grammar, reason: str) -> InvalidRequestError:
    if len(reason) > _LONGEST_REASON:
        reason = f"{reason[: _LONGEST_REASON // 2]} … {reason[-_LONGEST_REASON // 2 :]}"
    return InvalidRequestError(f"structured_outputs.{grammar.kind}: {reason}")


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


def known_vocabulary(tokenizer: TokenizerLike | None, vocab_size: int) -> Vocabulary:
    """The tokenizer's, with as many tokens as the model predicts; reading it takes a while the first time. Raises
    ``InvalidRequestError`` where it cannot spell texts (``tokenizer`` is None with ``skip_tokenizer_init``)."""
    return _cache.vocabulary(tokenizer, vocab_size)


def begun_character(prompt_token_ids: Sequence[int], tokenizer: TokenizerLike | None, vocab_size: int) -> bytes:
    """The bytes at the end of a prompt that begin a character; none where it ends with a whole one."""
    return known_vocabulary(tokenizer, vocab_size).begun_character(prompt_token_ids)


def awaited_automaton(
    grammar: Grammar, vocabulary: Vocabulary, limits: Limits
) -> AbstractContextManager[Future[Automaton]]:
    """The automaton that reads ``grammar``'s texts in tokens of ``vocabulary``. It is built as long as somebody is in
    such a context for it; may be used from several threads.

    Raises:
        RetryableRequestError: too many wait; by the future: the building process was killed.
        InvalidRequestError: by the future: the grammar is not supported, no text can be spelled, or a limit is passed.
    """
    return _cache.awaited(grammar, vocabulary, limits)


def automaton_of(grammar: Grammar, tokenizer: TokenizerLike | None, vocab_size: int, limits: Limits) -> Automaton:
    """Blocks until the automaton is built; raises as ``known_vocabulary`` and ``awaited_automaton``."""
    with awaited_automaton(grammar, known_vocabulary(tokenizer, vocab_size), limits) as future:
        return future.result()
