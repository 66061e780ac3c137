"""The graph of tokens that a decision may write: literal text, and the texts of its fields.

Literal text and each choice are tokenized on their own. The text of a pattern may be spelled by any tokens.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dllm_engine.decisions.fields import Field
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.constraints.automaton import Automaton
from dllm_engine.scheduler.constraints.decision import LITERAL, Decision
from dllm_engine.scheduler.constraints.lattice import Graph
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.structured_output.build import BuildInput, Grammar
from dllm_engine.structured_output.lifting import Vocabulary
from dllm_engine.structured_output.requests import build_input
from dllm_engine.structured_output.vocabulary import vocabulary_of


def automata_needed(fields: Sequence[Field], tokenizer: Any, vllm_config: Any) -> dict[str, BuildInput]:
    """The automata of the fields with a pattern, by name."""
    return {
        field.name: build_input(Grammar("json", json.dumps(field.schema), spaces=False), tokenizer, vllm_config)
        for field in fields
        if field.values is None
    }


def build_decision(
    fields: Sequence[Field], automata: Mapping[str, Automaton], tokenizer: Any, vllm_config: Any, top_k: int
) -> Decision:
    """The decision that writes a JSON object with these fields.

    Args:
        automata: of the fields with a pattern, by name.
        top_k: values that are reported of a field with a pattern.

    Raises ``InvalidRequestError`` naming the field that has no longest text, or that the tokenizer cannot spell, and
    where the decision is too large.
    """
    model_config = vllm_config.model_config
    tokens = _Tokens(tokenizer, vocabulary_of(tokenizer, model_config.hf_config.vocab_size))
    graph = GraphBuilder()
    before = "{"
    for number, field in enumerate(fields):
        quoted = field.values is not None and all(isinstance(value, str) and value for value in field.values)
        name = json.dumps(field.name, ensure_ascii=False)
        graph.literal(tokens.of(f"fields.{field.name}", f"{before}{name}:{_opening(field, quoted)}"))
        if field.values is None:
            graph.pattern(number, field.name, automata[field.name])
        else:
            texts = (json.dumps(value, ensure_ascii=False) for value in field.values)
            pieces = (text[1:-1] if quoted else f" {text}" for text in texts)
            graph.choices(number, [tokens.of(f"fields.{field.name}", piece) for piece in pieces])
        before = '", ' if quoted else ", "
    graph.literal(tokens.of("fields", before.removesuffix(", ") + "}"))
    edges = np.concatenate(graph.edges, axis=1)
    made = Graph(*edges[:3])
    if (length := made.longest) > model_config.max_model_len:
        raise InvalidRequestError(
            f"fields: their text needs up to {length} tokens, max_model_len is {model_config.max_model_len}; give "
            "fewer fields, or shorter texts"
        )
    if (size := length * edges.shape[1]) > (limit := EngineOptions.from_vllm_config(vllm_config).max_automaton_search):
        raise InvalidRequestError(
            f"fields: a pass searches {length} positions of a graph of {edges.shape[1]} tokens, together {size}; "
            f"max_automaton_search is {limit}: simplify the patterns, or raise it"
        )
    values = [field.values for field in fields]
    has_patterns = any(each is None for each in values)
    spellings = [tokens.spelling(token) for token in np.unique(edges[1]).tolist()] if has_patterns else []
    return Decision(made, edges[3], edges[4], [field.name for field in fields], values, spellings, top_k)


def _opening(field: Field, quoted: bool) -> str:
    """What is between the colon and a field's text. Most tokenizers join a space with the word behind it, so that it
    belongs to a choice that is no string."""
    if field.values is None:
        return " "
    return ' "' if quoted else ""


class _Tokens:
    """Tokens of pieces of text."""

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary

    def spelling(self, token: int) -> bytes:
        first, last = self.vocabulary.starts[token : token + 2]
        return self.vocabulary.token_bytes[first:last].tobytes()

    def of(self, name: str, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        if b"".join(map(self.spelling, tokens)) != text.encode():
            raise InvalidRequestError(f"{name}: the tokens of this model do not spell {text!r}; leave it out")
        return tokens


class GraphBuilder:
    """Edges of a graph, piece by piece."""

    def __init__(self) -> None:
        self.edges: list[np.ndarray] = []
        """int32 ``[5, n]``: source, token, target, field and choice of edges."""
        self.num_states = 1
        self.ends = [0]
        """States at the end of the last piece."""

    def literal(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            target = self._new_state()
            self._add(self.ends, token, target, LITERAL)
            self.ends = [target]

    def choices(self, field: int, choices: Sequence[Sequence[int]]) -> None:
        end = self._new_state()
        for number, tokens in enumerate(choices):
            sources, choice = self.ends, number
            for token, target in self._chain(tokens, end):
                self._add(sources, token, target, field, choice)
                sources, choice = [target], LITERAL
        self.ends = [end]

    def pattern(self, field: int, name: str, automaton: Automaton) -> None:
        """Raises ``InvalidRequestError`` where the texts of the automaton have no bound."""
        if not _is_bounded(automaton):
            raise InvalidRequestError(
                f"fields.{name}: its texts have no longest one; begin the pattern with ^ and end it with $, and give "
                "repetitions an upper bound, such as {1,8} for +"
            )
        states = np.array([*self.ends, *(self._new_state() for _ in automaton.accepting[1:])])
        tokens = np.flatnonzero(automaton.class_of >= 0)
        targets = automaton.next_state[:, automaton.class_of[tokens]]
        sources, columns = np.nonzero(targets >= 0)
        self._add(states[sources], tokens[columns], states[targets[sources, columns]], field)
        self.ends = states[automaton.accepting].tolist()

    def _add(self, sources: Any, tokens: Any, targets: Any, field: int, choice: int = LITERAL) -> None:
        """Add an edge from each of ``sources``."""
        columns = np.broadcast_arrays(sources, tokens, targets, field, choice)
        self.edges.append(np.stack(columns).astype(np.int32))

    def _chain(self, tokens: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
        """Tokens with the states that they lead to."""
        for token in tokens[:-1]:
            yield token, self._new_state()
        yield tokens[-1], end

    def _new_state(self) -> int:
        self.num_states += 1
        return self.num_states - 1


def _is_bounded(automaton: Automaton) -> bool:
    """Return True if no text of the automaton is longer than its number of states."""
    sources, kinds = np.nonzero(automaton.next_state >= 0)
    targets = automaton.next_state[sources, kinds]
    reached = np.arange(len(automaton.accepting)) == 0
    for _ in range(len(reached)):
        following = np.zeros_like(reached)
        following[targets[reached[sources]]] = True
        reached = following
    return not reached.any()
