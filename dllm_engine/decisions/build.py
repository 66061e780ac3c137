"""The graph of tokens that a decision may write: literal text, and the texts of its fields.

Literal text and each choice are tokenized on their own. The text of a pattern may be spelled by any tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from string import Formatter
from typing import Any

import numpy as np

from dllm_engine.decisions.fields import Field
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.constraints.constraint import Automaton
from dllm_engine.scheduler.constraints.decision import Decision
from dllm_engine.scheduler.constraints.lattice import LITERAL, Graph, edges_between, states_reached
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.structured_output.build import BuildInput, Grammar
from dllm_engine.structured_output.requests import build_input, vocabulary_of

_SUM_COST = 16
"""To sum over a transition takes as long as to search so many."""
_BUILT_AT_ONCE = 8
"""Transitions that are looked at in the time of a search of one, where a lattice is built."""


@dataclass(frozen=True)
class Texts:
    """Literal text, and the texts of the fields between."""

    literals: list[str]
    """Before each field, and behind the last."""
    fields: list[Field]
    choices: list[list[str]]
    """Texts of each field's values; empty for a field with a pattern."""
    is_json: list[bool]
    """True for each field whose text is JSON."""

    @classmethod
    def as_json(cls, fields: Sequence[Field]) -> "Texts":
        """The text of a JSON object. Quotes around strings are literal text, if a field has nothing else."""
        literals, choices, before = [], [], "{"
        for field in fields:
            values = field.values or []
            quoted = bool(values) and all(isinstance(value, str) and value for value in values)
            texts = [json.dumps(value, ensure_ascii=False) for value in values]
            literals.append(f"{before}{json.dumps(field.name, ensure_ascii=False)}: " + '"' * quoted)
            choices.append([text[1:-1] for text in texts] if quoted else texts)
            before = '"' * quoted + ", "
        return cls([*literals, before.removesuffix(", ") + "}"], list(fields), choices, [True] * len(fields))

    @classmethod
    def in_template(cls, fields: Sequence[Field], template: str) -> "Texts":
        """A text in which ``{name}`` stands for a field, with strings as they are; ``{{`` and ``}}`` are braces.

        Raises ``InvalidRequestError`` for a template without each field once, and for choices of one text.
        """
        by_name, literals, asked = {field.name: field for field in fields}, [""], []
        try:
            for literal, name, form, conversion in Formatter().parse(template):
                literals[-1] += literal
                if name is not None:
                    if form or conversion or name not in by_name:
                        raise ValueError(f"{{{name}}} is no field")
                    asked.append(by_name[name])
                    literals.append("")
            if sorted(field.name for field in asked) != sorted(by_name):
                raise ValueError("it does not hold each field once")
        except ValueError as error:
            raise InvalidRequestError(
                f"template: {error}; write {{name}} for each field, and {{{{ for a brace"
            ) from None
        choices = [
            [value if isinstance(value, str) else json.dumps(value) for value in field.values or []] for field in asked
        ]
        for field, texts in zip(asked, choices, strict=True):
            if len({*texts}) < len(texts):
                raise InvalidRequestError(f"fields.{field.name}: two choices have the same text in a template")
        return cls(literals, asked, choices, ["pattern" not in field.schema for field in asked])

    def automata_needed(self, tokenizer: Any, vllm_config: Any) -> dict[str, BuildInput]:
        """The automata of the fields with a pattern, by name."""
        needed = {}
        for field, is_json in zip(self.fields, self.is_json, strict=True):
            if field.values is None:
                text = json.dumps(field.schema) if is_json else field.schema["pattern"]
                grammar = Grammar("json" if is_json else "regex", text)
                needed[field.name] = build_input(grammar, tokenizer, vllm_config)
        return needed


def build_decision(
    texts: Texts, automata: Mapping[str, Automaton], tokenizer: Any, vllm_config: Any, top_k: int
) -> Decision:
    """The decision that writes these texts, with ``automata`` by the names of their fields.

    Raises ``InvalidRequestError`` naming the field that has no longest text, or that the tokenizer cannot spell, and
    where the decision is too large.
    """
    model_config, builder = vllm_config.model_config, GraphBuilder()
    spelling = vocabulary_of(tokenizer, model_config.hf_config.vocab_size).spelling

    def tokens_of(name: str, text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        if b"".join(map(spelling, tokens)) != text.encode():
            raise InvalidRequestError(f"{name}: the tokens of this model do not spell {text!r}; leave it out")
        return tokens

    for number, (field, literal, choices) in enumerate(zip(texts.fields, texts.literals, texts.choices, strict=False)):
        name = f"fields.{field.name}"
        # Most tokenizers join a space with the word behind it.
        has_space = bool(choices) and literal.endswith(" ")
        builder.literal(tokens_of(name, literal.removesuffix(" ") if has_space else literal))
        if field.values is None:
            builder.pattern(number, field.name, automata[field.name])
        elif all(choices) or has_space:
            builder.choices(number, [tokens_of(name, " " * has_space + text) for text in choices])
        else:
            raise InvalidRequestError(f"{name}: a choice has no text; leave it out")
    builder.literal(tokens_of("the text behind the last field", texts.literals[-1]))
    if builder.longest > model_config.max_model_len:
        raise InvalidRequestError(
            f"fields: their text needs up to {builder.longest} tokens, max_model_len is {model_config.max_model_len}; "
            "give fewer fields, or shorter texts"
        )
    graph = builder.graph()
    limit = EngineOptions.from_vllm_config(vllm_config).max_automaton_search
    is_large = builder.longest * len(graph.edges) > _BUILT_AT_ONCE * limit
    if is_large or graph.size > limit // _SUM_COST:
        raise InvalidRequestError(
            f"fields: at {builder.longest} positions there may be too many of their {len(graph.edges)} tokens for "
            f"max_automaton_search={limit}; simplify the patterns, give choices equally many tokens, or raise it"
        )
    names, values = [field.name for field in texts.fields], [field.values for field in texts.fields]
    spellings = [spelling(token) for token in np.unique(graph.edges["token"]).tolist()] if automata else []
    return Decision(graph, names, values, spellings, top_k, texts.is_json)


class GraphBuilder:
    """Edges of a graph, piece by piece."""

    def __init__(self) -> None:
        self.edges: list[np.ndarray] = []
        """``EDGE`` ``[n]`` each."""
        self._new_state = count(1).__next__
        self.ends = [0]
        """States at the end of the last piece."""
        self.longest = 0
        """Upper bound of the tokens of a sequence."""

    def graph(self) -> Graph:
        return Graph(np.array(self.ends), np.concatenate(self.edges))

    def literal(self, tokens: Sequence[int]) -> None:
        if tokens:
            self.choices(LITERAL, [tokens])

    def choices(self, field: int, choices: Sequence[Sequence[int]]) -> None:
        self.longest += max(map(len, choices))
        end = self._new_state()
        for number, tokens in enumerate(choices):
            sources, choice = self.ends, LITERAL if field == LITERAL else number
            for left, token in zip(reversed(range(len(tokens))), tokens, strict=True):
                target = self._new_state() if left else end
                self.edges.append(edges_between(sources, token, target, field, choice))
                sources, choice = [target], LITERAL
        self.ends = [end]

    def pattern(self, field: int, name: str, automaton: Automaton) -> None:
        """Raises ``InvalidRequestError`` where texts of the automaton have no bound, or one is empty."""
        if not _is_bounded(automaton):
            raise InvalidRequestError(
                f"fields.{name}: its texts have no longest one; begin the pattern with ^ and end it with $, and give "
                "repetitions an upper bound, such as {1,8} for +"
            )
        if automaton.accepting[0]:
            raise InvalidRequestError(f"fields.{name}: its pattern matches an empty text; let it match one character")
        self.longest += len(automaton.accepting) - 1
        states = np.array([self._new_state() for _ in automaton.accepting])
        tokens = np.flatnonzero(automaton.class_of >= 0)
        following = automaton.next_state[:, automaton.class_of[tokens]]
        sources, columns = np.nonzero(following >= 0)
        targets = states[following[sources, columns]]
        begins = sources == 0
        self.edges.append(edges_between(states[sources[~begins]], tokens[columns[~begins]], targets[~begins], field))
        for end in self.ends:
            self.edges.append(edges_between(end, tokens[columns[begins]], targets[begins], field))
        self.ends = states[automaton.accepting].tolist()


def _is_bounded(automaton: Automaton) -> bool:
    """Return True if no text of the automaton is longer than its number of states."""
    num_states, (sources, kinds) = len(automaton.accepting), np.nonzero(automaton.next_state >= 0)
    reached = states_reached(sources, automaton.next_state[sources, kinds], np.arange(num_states) == 0)
    return next(islice(reached, num_states, None), None) is None
