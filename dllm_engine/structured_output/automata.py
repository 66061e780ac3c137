"""Automata of grammars over a tokenizer's vocabulary: built in a process of their own, and kept."""

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import BoundedSemaphore, Lock
from weakref import WeakKeyDictionary

from vllm.tokenizers import TokenizerLike

from dllm_engine.scheduler.constraints.automaton import Automaton, unpacked
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.structured_output.build import BUILT, Grammar, Limits
from dllm_engine.structured_output.vocabulary import Vocabulary, vocabulary_of

_KEPT_BYTES = 256 << 20
"""What the automata kept take together, at most."""
_AT_ONCE = 2
"""Builds that run at a time; others wait."""
COUNTS = ("constrained_requests", "automaton_builds", "automaton_build_seconds", "automaton_cache_hits")
"""Names of metrics: builds are also those that failed or were ended at a limit, hits also those of calls that waited
while another call built their automaton."""
_PATIENCE = 10
"""A busy machine gives a build less than a core: it is ended after as many times ``build_seconds``."""


class _Cache:
    """Automata by what they are made from; those used last are kept. May be used from several threads."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.turns = BoundedSemaphore(_AT_ONCE)
        self.counts = dict.fromkeys(COUNTS, 0.0)
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
                self.counts["automaton_cache_hits"] += 1
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
                self.count(automaton_builds=1, automaton_build_seconds=time.monotonic() - start)

    def count(self, **amounts: float) -> None:
        with self.lock:
            for name, amount in amounts.items():
                self.counts[name] += amount

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
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "dllm_engine.structured_output.build"],
            input=pickle.dumps((grammar, limits, vocabulary.token_bytes, vocabulary.starts)),
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


def count_request() -> None:
    """Note for the metrics that a request was admitted."""
    _cache.count(constrained_requests=1)


def take_counts() -> dict[str, float]:
    """What this process has counted since the last call, by name of the metric."""
    with _cache.lock:
        counts, _cache.counts = _cache.counts, dict.fromkeys(COUNTS, 0.0)
    return counts


def begun_character(prompt_token_ids: Sequence[int], tokenizer: TokenizerLike | None, vocab_size: int) -> bytes:
    """The bytes at the end of a prompt that begin a character; none where it ends with a whole one."""
    return _cache.vocabulary(tokenizer, vocab_size).begun_character(prompt_token_ids)


def automaton_of(grammar: Grammar, tokenizer: TokenizerLike | None, vocab_size: int, limits: Limits) -> Automaton:
    """The automaton that reads ``grammar``'s texts in tokens of ``tokenizer``, of which the model predicts
    ``vocab_size``. Blocks until it is built, which a second call for the same does not wait for; may be called from
    several threads. Raises ``InvalidRequestError`` where the tokenizer cannot spell texts (``tokenizer`` is None with
    ``skip_tokenizer_init``), no text can be spelled, or a limit is passed."""
    return _cache.automaton(grammar, _cache.vocabulary(tokenizer, vocab_size), limits)
