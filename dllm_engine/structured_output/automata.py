"""Automata of grammars over a tokenizer's vocabulary: built in a process of their own, and kept."""

import math
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from threading import BoundedSemaphore, Lock
from weakref import WeakKeyDictionary

from vllm.tokenizers import TokenizerLike

from dllm_engine.scheduler.constraints.automaton import Automaton, unpacked
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.structured_output.build import BUILT, Task
from dllm_engine.structured_output.grammar import Grammar
from dllm_engine.structured_output.vocabulary import Vocabulary, vocabulary_of

_KEPT_BYTES = 256 << 20
"""What the automata kept take together, at most."""
_AT_ONCE = 2
"""Builds that run at a time; others wait."""
_PATIENCE = 10
"""A busy machine gives a build less than a core: it is ended after as many times ``build_seconds``."""


@dataclass(frozen=True)
class Limits:
    """What one automaton may cost."""

    max_states: int
    build_seconds: float
    """Seconds of one core that building it may take."""


@dataclass(frozen=True)
class BuildCounts:
    """Of this process, since it started."""

    builds: int = 0
    """Processes that built, also those that failed or were ended at a limit."""
    seconds: float = 0.0
    """What they took, summed."""
    cache_hits: int = 0
    """Calls of ``automaton_of`` that found their automaton, or waited while another call built it."""


class _Cache:
    """Automata by what they are made from; those used last are kept. May be used from several threads."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.turns = BoundedSemaphore(_AT_ONCE)
        self.counts = BuildCounts()
        self.automata: OrderedDict[object, Future[Automaton]] = OrderedDict()
        self.vocabularies: WeakKeyDictionary[TokenizerLike, dict[int, Vocabulary]] = WeakKeyDictionary()

    def vocabulary(self, tokenizer: TokenizerLike | None, vocab_size: int) -> Vocabulary:
        with self.lock:
            by_size = {} if tokenizer is None else self.vocabularies.setdefault(tokenizer, {})
        if vocab_size not in by_size:  # two threads may both read it: they read the same
            by_size[vocab_size] = vocabulary_of(tokenizer, vocab_size)
        return by_size[vocab_size]

    def automaton(self, grammar: Grammar, vocabulary: Vocabulary, limits: Limits) -> Automaton:
        key = (grammar, vocabulary.digest, limits)
        with self.lock:
            future = self.automata.get(key)
            if future is not None:
                self.automata.move_to_end(key)
                self.counts = replace(self.counts, cache_hits=self.counts.cache_hits + 1)
            else:
                own = self.automata[key] = Future()
        if future is not None:
            return future.result()
        try:
            own.set_result(self._built(grammar, vocabulary, limits))
        except BaseException as error:
            with self.lock:
                del self.automata[key]
            own.set_exception(error)
            raise
        self._let_go()
        return own.result()

    def _built(self, grammar: Grammar, vocabulary: Vocabulary, limits: Limits) -> Automaton:
        with self.turns:
            start = time.monotonic()
            try:
                return _build_apart(grammar, vocabulary, limits)
            finally:
                seconds = time.monotonic() - start
                with self.lock:
                    counts = self.counts
                    self.counts = replace(counts, builds=counts.builds + 1, seconds=counts.seconds + seconds)

    def _let_go(self) -> None:
        with self.lock:
            finished = {key: _size(future.result()) for key, future in self.automata.items() if future.done()}
            total = sum(finished.values())
            for key, size in [*finished.items()][:-1]:
                if total <= _KEPT_BYTES:
                    break
                total -= size
                del self.automata[key]


def _size(automaton: Automaton) -> int:
    """Its tables, and as much again for ``packed`` and what that is made from."""
    return 2 * sum(table.nbytes for table in (automaton.class_of, automaton.next_state, automaton.accepting))


def _build_apart(grammar: Grammar, vocabulary: Vocabulary, limits: Limits) -> Automaton:
    seconds = math.ceil(limits.build_seconds)
    task = Task(grammar.kind, grammar.text, grammar.spaces, limits.max_states, seconds)
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "dllm_engine.structured_output.build"],
            input=task.message(vocabulary.token_bytes, vocabulary.starts),
            capture_output=True,
            timeout=_PATIENCE * seconds,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        status = ended.returncode
    except subprocess.TimeoutExpired:
        status = -signal.SIGXCPU
    if status == -signal.SIGXCPU:
        raise _failed(grammar, f"its automaton takes over max_automaton_seconds={limits.build_seconds:g} to build")
    if status == -signal.SIGKILL:
        raise _failed(grammar, "building its automaton was ended from outside; the machine may be out of memory")
    if status:
        raise RuntimeError(f"building an automaton failed: {ended.stderr.decode(errors='replace')[-2000:]}")
    answer = ended.stdout
    if answer[:1] != BUILT:
        raise _failed(grammar, answer[1:].decode())
    return unpacked(answer[1:])


def _failed(grammar: Grammar, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs.{grammar.kind}: {reason}")


_cache = _Cache()


def build_counts() -> BuildCounts:
    """For metrics."""
    return _cache.counts


def automaton_of(grammar: Grammar, tokenizer: TokenizerLike | None, vocab_size: int, limits: Limits) -> Automaton:
    """The automaton that reads ``grammar``'s texts in tokens of ``tokenizer``, of which the model predicts
    ``vocab_size``. Blocks until it is built, which a second call for the same does not wait for; may be called from
    several threads. Raises ``InvalidRequestError`` where the tokenizer cannot spell texts (``tokenizer`` is None with
    ``skip_tokenizer_init``), no text can be spelled, or a limit is passed."""
    return _cache.automaton(grammar, _cache.vocabulary(tokenizer, vocab_size), limits)
