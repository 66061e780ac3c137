"""Automata of grammars over a tokenizer's vocabulary: built in a process of their own, and kept."""

from dataclasses import dataclass

from vllm.tokenizers import TokenizerLike

from dllm_engine.scheduler.constraints.automaton import Automaton
from dllm_engine.structured_output.grammar import Grammar


@dataclass(frozen=True)
class Limits:
    """What one automaton may cost."""

    max_states: int = 4096
    build_seconds: float = 30.0


@dataclass(frozen=True)
class BuildCounts:
    """Of this process, since it started."""

    builds: int = 0
    """Processes that built, also those that failed or were ended at a limit."""
    seconds: float = 0.0
    """What they took, summed."""
    cache_hits: int = 0
    """Calls of ``automaton_of`` that found their automaton, or waited while another call built it."""


def build_counts() -> BuildCounts:
    """For metrics."""
    raise NotImplementedError


def automaton_of(grammar: Grammar, tokenizer: TokenizerLike | None, vocab_size: int, limits: Limits) -> Automaton:
    """The automaton that reads ``grammar``'s texts in tokens of ``tokenizer``, of which the model predicts
    ``vocab_size``. Blocks until it is built, which a second call for the same does not wait for; may be called from
    several threads. Raises ``InvalidRequestError`` where the tokenizer cannot spell texts (``tokenizer`` is None with
    ``skip_tokenizer_init``), no text can be spelled, or a limit is passed."""
    raise NotImplementedError
