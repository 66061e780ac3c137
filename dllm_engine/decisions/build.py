"""The graph of tokens that a decision may write: literal text, and the texts of its
fields.

Literal text and each choice are tokenized separately. The text of a pattern may be
spelled by any tokens. A decision is built in a separate process, so this module imports
little.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from string import Formatter

import numpy as np
from tokenizers import Tokenizer

from dllm_engine.constraints.automaton import Automaton
from dllm_engine.constraints.decision import Decision
from dllm_engine.constraints.graph import (
    LITERAL,
    Graph,
    edges_between,
    joined,
    states_reached,
)
from dllm_engine.decisions.fields import Field, read_fields
from dllm_engine.structured_output.build import BuildInput, Grammar, build
from dllm_engine.structured_output.compiler import Vocabulary

_SUM_COST = 16
"""Cost of summing over a transition. The unit is the search of one transition."""
_BUILT_AT_ONCE = 8
"""Number of transitions that building a lattice reads in the time of searching one."""
_BEGINNING_COST = 200
"""Cost of extending a beginning of a text from a state of a pattern, as a number of
searched transitions.
"""
_PLACED_AT_ONCE = 8
"""Number of possible next tokens of positions that are read in the time of searching one
transition.
"""
_SPARE_BEGINNINGS = 16
"""A search for ``top_k`` values extends at least this many more beginnings from each
state.
"""
_BEGINNINGS_PER_VALUE = 4
"""Factor on the number of beginnings if there is time: all spellings of a probable text
may be improbable.
"""


@dataclass(frozen=True)
class Texts:
    """Literal text, and the texts of the fields between."""

    literals: list[str]
    """Text before each field, and behind the last."""
    fields: list[Field]
    choices: list[list[str]]
    """Texts of each field's values; empty for a field with a pattern."""
    is_json: list[bool]
    """True for each field whose text is JSON."""

    @classmethod
    def as_json(cls, fields: Sequence[Field]) -> "Texts":
        """The text of a JSON object. If all values of a field are strings, their quotes
        are literal text.
        """
        literals, choices, before = [], [], "{"
        for field in fields:
            values = field.values or []
            quoted = bool(values) and all(
                isinstance(value, str) and value for value in values
            )
            texts = [json.dumps(value, ensure_ascii=False) for value in values]
            literals.append(
                f"{before}{json.dumps(field.name, ensure_ascii=False)}: " + '"' * quoted
            )
            choices.append([text[1:-1] for text in texts] if quoted else texts)
            before = '"' * quoted + ", "
        return cls(
            [*literals, before.removesuffix(", ") + "}"],
            list(fields),
            choices,
            [True] * len(fields),
        )

    @classmethod
    def in_template(cls, fields: Sequence[Field], template: str) -> "Texts":
        """The text of a template. ``{name}`` stands for a field; strings have no
        quotes. ``{{`` and ``}}`` are braces.

        Raises ``ValueError`` if the template does not have each field once, or if two
        choices of a field have the same text.
        """
        by_name, literals, asked = {field.name: field for field in fields}, [""], []
        try:
            for literal, name, form, conversion in Formatter().parse(template):
                literals[-1] += literal
                if name is not None:
                    if form or conversion or name not in by_name:
                        raise ValueError(f"{{{name}}} is not a field")
                    asked.append(by_name[name])
                    literals.append("")
            if sorted(field.name for field in asked) != sorted(by_name):
                raise ValueError("it does not hold each field once")
        except ValueError as error:
            raise ValueError(
                f"template: {error}; write {{name}} for each field, and {{{{ for a "
                f"brace"
            ) from None
        choices = [
            [
                value if isinstance(value, str) else json.dumps(value)
                for value in field.values or []
            ]
            for field in asked
        ]
        for field, texts in zip(asked, choices, strict=True):
            if len({*texts}) < len(texts):
                raise ValueError(
                    f"fields.{field.name}: two choices have the same text in a template"
                )
        return cls(
            literals, asked, choices, ["pattern" not in field.schema for field in asked]
        )


@dataclass(frozen=True)
class DecisionInput:
    """Input of the build of a decision, and its limits."""

    schema: str
    """JSON schema of an object, with a property for each field."""
    template: str | None
    top_k: int
    vocabulary: Vocabulary
    tokenizer: bytes
    """The content of ``tokenizer.json``."""
    max_model_len: int
    max_states: int
    build_seconds: float
    """Limit on the build's time, in seconds of one core."""
    max_search: int

    @property
    def about(self) -> str:
        return "fields: their decision"

    def run(self) -> bytes:
        """Build the decision. Raises ``ValueError`` with the reason if there is none."""
        try:
            return build_decision(self).packed
        except (MemoryError, RecursionError) as error:
            raise ValueError(
                f"fields: their decision takes too much to build "
                f"({type(error).__name__})"
            ) from None


def build_decision(wanted: DecisionInput) -> Decision:
    """Build the decision that writes these texts.

    Raises ``ValueError`` if a field has no longest text or cannot be spelled by the
    tokenizer (it is named), or if the decision is too large.
    """
    fields = read_fields(json.loads(wanted.schema))
    texts = (
        Texts.as_json(fields)
        if wanted.template is None
        else Texts.in_template(fields, wanted.template)
    )
    spelling, builder = Spelling(wanted), GraphBuilder()
    for number, (field, literal, choices) in enumerate(
        zip(texts.fields, texts.literals, texts.choices, strict=False)
    ):
        name = f"fields.{field.name}"
        # Most tokenizers join a space with the word behind it.
        has_space = bool(choices) and literal.endswith(" ")
        builder.literal(
            spelling.tokens_of(
                name, [literal.removesuffix(" ") if has_space else literal]
            )[0]
        )
        if field.values is None:
            builder.pattern(
                number,
                field.name,
                spelling.automaton(field, is_json=texts.is_json[number]),
            )
        elif all(choices) or has_space:
            builder.choices(
                number,
                spelling.tokens_of(name, [" " * has_space + text for text in choices]),
            )
        else:
            raise ValueError(f"{name}: a choice has no text; leave it out")
        # The first fields may be too large already.
        _check_size(builder.longest, builder.num_edges, wanted)
    builder.literal(
        spelling.tokens_of("the text behind the last field", [texts.literals[-1]])[0]
    )
    _check_size(builder.longest, builder.num_edges, wanted)
    graph = builder.graph()
    if graph.size > wanted.max_search // _SUM_COST:
        raise _too_large(builder.longest, builder.num_edges, wanted)
    beginnings = _beginnings(
        graph, [field.values is None for field in texts.fields], wanted
    )
    names = [field.name for field in texts.fields]
    values = [field.values for field in texts.fields]
    has_patterns = any(field.values is None for field in texts.fields)
    tokens = np.unique(graph.edges["token"]).tolist() if has_patterns else []
    spellings = [wanted.vocabulary.spelling(token) for token in tokens]
    return Decision(
        graph, names, values, spellings, wanted.top_k, texts.is_json, beginnings
    )


def _beginnings(graph: Graph, is_pattern: Sequence[bool], wanted: DecisionInput) -> int:
    """Number of beginnings of texts that the search for the most probable values
    extends from each state of a pattern.

    Raises ``ValueError`` if the search would take too long with the number that it
    needs.
    """
    edges = graph.edges[np.isin(graph.edges["field"], np.flatnonzero(is_pattern))]
    if not edges.size:
        return 0
    if wanted.top_k < 1:
        raise ValueError(
            f"top_k={wanted.top_k}: ask for 1 value of each pattern at least"
        )
    cost = _BEGINNING_COST * len(np.unique(edges["target"]))
    cost += int(graph.num_positions[edges["source"]].sum()) // _PLACED_AT_ONCE
    allowed = wanted.max_search // cost
    needed = wanted.top_k + _SPARE_BEGINNINGS
    if needed > allowed:
        lower = (
            f"lower top_k to {allowed - _SPARE_BEGINNINGS}, "
            if allowed > _SPARE_BEGINNINGS
            else ""
        )
        raise ValueError(
            f"top_k={wanted.top_k}: the search for so many values of the patterns "
            f"takes as long as that of {cost * needed} transitions, "
            f"max_automaton_search={wanted.max_search}; {lower}give fewer or shorter "
            "patterns, or raise it"
        )
    return min(_BEGINNINGS_PER_VALUE * needed, allowed)


def _check_size(longest: int, num_edges: int, wanted: DecisionInput) -> None:
    """Raise ``ValueError`` if texts of up to ``longest`` tokens, with ``num_edges``
    edges in all, are too large.
    """
    if longest > wanted.max_model_len:
        raise ValueError(
            f"fields: their text needs {longest} tokens or more, max_model_len is "
            f"{wanted.max_model_len}; give fewer "
            "fields, or shorter texts"
        )
    if longest * num_edges > _BUILT_AT_ONCE * wanted.max_search:
        raise _too_large(longest, num_edges, wanted)


def _too_large(longest: int, num_edges: int, wanted: DecisionInput) -> ValueError:
    return ValueError(
        f"fields: at {longest} positions or more there may be too many of their "
        f"{num_edges} tokens for max_automaton_search={wanted.max_search}; simplify "
        f"the patterns, give choices equally many tokens, or raise it"
    )


class Spelling:
    """Tokens of texts, and automata of patterns."""

    def __init__(self, wanted: DecisionInput) -> None:
        self.wanted = wanted
        self.tokenizer = Tokenizer.from_str(wanted.tokenizer.decode())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._automata: dict[Grammar, Automaton] = {}

    def tokens_of(self, name: str, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text. Raises ``ValueError`` for a text that they do not spell."""
        encoded = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        spelled = self.wanted.vocabulary.spelling
        for text, encoding in zip(texts, encoded, strict=True):
            if b"".join(map(spelled, encoding.ids)) != text.encode():
                raise ValueError(
                    f"{name}: the tokens of this model do not spell {text!r}; leave it "
                    f"out"
                )
        return [encoding.ids for encoding in encoded]

    def automaton(self, field: Field, *, is_json: bool) -> Automaton:
        """The automaton of a field with a pattern."""
        grammar = (
            Grammar("json", json.dumps(field.schema))
            if is_json
            else Grammar("regex", field.schema["pattern"])
        )
        wanted = self.wanted
        if grammar not in self._automata:
            limits = wanted.max_states, wanted.build_seconds, wanted.max_search
            try:
                self._automata[grammar] = build(
                    BuildInput(grammar, wanted.vocabulary, *limits)
                )
            except ValueError as error:
                raise ValueError(f"fields.{field.name}: {error}") from None
        return self._automata[grammar]


def choice_decision(
    literals: Sequence[Sequence[int]],
    options: Sequence[Sequence[Sequence[Sequence[int]]]],
    max_search: int,
) -> Decision:
    """The decision between options that are tokenized already. The value of a field is
    the number of an option.

    Args:
        literals: tokens before each field, and behind the last.
        options: of each field, the ways to spell each of its options.

    Raises:
        ValueError: the options have too many tokens.
    """
    builder = GraphBuilder()
    for field, (literal, spellings) in enumerate(zip(literals, options, strict=False)):
        builder.literal(literal)
        numbers = [i for i, each in enumerate(spellings) for _ in each]
        spelled = [tokens for each in spellings for tokens in each]
        builder.choices(field, spelled, numbers)
    builder.literal(literals[-1])
    is_large = builder.longest * builder.num_edges > _BUILT_AT_ONCE * max_search
    if is_large or (graph := builder.graph()).size > max_search // _SUM_COST:
        raise ValueError(
            f"the labels have {builder.num_edges} tokens at up to {builder.longest} "
            f"positions, too many for max_automaton_search={max_search}; give fewer or "
            f"shorter ones, ask with marks (decision_way), or raise it"
        )
    names = [str(number) for number in range(len(options))]
    values = [range(len(each)) for each in options]
    return Decision(graph, names, values, [], 1, [False] * len(names), 0)


class GraphBuilder:
    """Edges of a graph, piece by piece."""

    def __init__(self) -> None:
        self.edges: list[np.ndarray] = []
        """``EDGE`` ``[n]`` each."""
        self.num_edges = 0
        self._new_state = count(1).__next__
        self.ends = [0]
        """States at the end of the last piece."""
        self.longest = 0
        """Upper bound of the tokens of a sequence."""

    def _add(self, edges: np.ndarray) -> None:
        self.edges.append(edges)
        self.num_edges += len(edges)

    def graph(self) -> Graph:
        return Graph(np.array(self.ends), joined(self.edges))

    def literal(self, tokens: Sequence[int]) -> None:
        if tokens:
            self.choices(LITERAL, [tokens])

    def choices(
        self,
        field: int,
        choices: Sequence[Sequence[int]],
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Add the tokens of each choice, at least one token each. ``numbers``: the
        number of each entry's choice, if a choice has several spellings; None: each
        entry is the next choice.
        """
        self.longest += max(map(len, choices))
        end, rows = self._new_state(), []
        seconds = [self._new_state() if len(tokens) > 1 else end for tokens in choices]
        """State behind the first token of each choice."""
        for source, tokens in zip(seconds, choices, strict=True):
            for left, token in zip(
                reversed(range(len(tokens) - 1)), tokens[1:], strict=True
            ):
                target = self._new_state() if left else end
                rows.append((source, token, target))
                source = target
        if numbers is None:
            numbers = range(len(choices))
        firsts = [tokens[0] for tokens in choices]
        self._add(
            edges_between(
                np.array(self.ends)[:, None],
                firsts,
                seconds,
                field,
                LITERAL if field == LITERAL else np.array(numbers),
            ).ravel()
        )
        if rows:
            sources, behind, targets = np.array(rows).T
            self._add(edges_between(sources, behind, targets, field))
        self.ends = [end]

    def pattern(self, field: int, name: str, automaton: Automaton) -> None:
        """Add the texts of an automaton. Raises ``ValueError`` if their length has no
        bound, or if one is empty.
        """
        if not _is_bounded(automaton):
            raise ValueError(
                f"fields.{name}: its texts have no longest one; begin the pattern with "
                f"^ and end it with $, and give "
                "repetitions an upper bound, such as {1,8} for +"
            )
        if automaton.accepting[0]:
            raise ValueError(
                f"fields.{name}: its pattern matches an empty text; let it match one "
                f"character"
            )
        self.longest += len(automaton.accepting) - 1
        states = np.array([self._new_state() for _ in automaton.accepting])
        tokens = np.flatnonzero(automaton.class_of >= 0)
        following = automaton.next_state[:, automaton.class_of[tokens]]
        sources, columns = np.nonzero(following >= 0)
        targets = states[following[sources, columns]]
        begins = sources == 0
        self._add(
            edges_between(
                states[sources[~begins]],
                tokens[columns[~begins]],
                targets[~begins],
                field,
            )
        )
        before = np.array(self.ends)[:, None]
        self._add(
            edges_between(
                before, tokens[columns[begins]], targets[begins], field
            ).ravel()
        )
        self.ends = states[automaton.accepting].tolist()


def _is_bounded(automaton: Automaton) -> bool:
    """Return True if no text of the automaton is longer than its number of states."""
    num_states, (sources, kinds) = (
        len(automaton.accepting),
        np.nonzero(automaton.next_state >= 0),
    )
    reached = states_reached(
        sources, automaton.next_state[sources, kinds], np.arange(num_states) == 0
    )
    return next(islice(reached, num_states, None), None) is None
