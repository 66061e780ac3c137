"""Words that a cursor has cut: the given tokens beside a hole, opened again.

A tokenizer that has a token ``print`` never writes ``pri`` before ``nt``, so a model
that sees ``pri`` finds nothing probable behind it. So the token is left out, and the
hole begins with any token whose text begins with ``pri``; the answer is what is behind
that. Likewise at the end of the hole.

``pri`` may itself be several tokens, of which the last one is opened. If a token begins
with the text of several, all of these are opened where the model says so: a forward
pass compares the probability of such tokens with that of the first one given.
"""

import json
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any, Self

from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams

from dllm_engine.infill.template import Template
from dllm_engine.lengths.forward_passes import Passes, Probe
from dllm_engine.request_options.sampling_params import HOLE_EDGES, bytes_in

_LAST = "\U0010ffff"
_NEAR = 8
"""Tokens among which those at the end are decoded."""
_MOST_OPENED = 4
"""Tokens before a hole that are opened together."""
_MOST_COMPARED = 64
"""Tokens that may begin with their text."""
_MOST_REPEATED = 24
"""Characters behind a hole that its end must not repeat."""
_BEFORE, _MASKS = 256, 4
"""Given tokens, and masks behind them, that the comparison sees."""


class Vocabulary:
    """The tokens of a tokenizer that are no special ones, by their beginnings and by
    their ends.
    """

    def __init__(self, tokenizer: Any) -> None:
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self.names = {
            token: name
            for name, token in tokenizer.get_vocab().items()
            if token not in special
        }
        self._tokens = {name: token for token, name in self.names.items()}
        self._forwards = sorted((name, token) for token, name in self.names.items())
        self._backwards = sorted((name[::-1], i) for i, name in self.names.items())

    def beginning_with(self, name: str) -> list[int]:
        return _between(self._forwards, name)

    def named(self, names: Iterable[str]) -> list[int]:
        return [self._tokens[name] for name in names if name in self._tokens]

    def ending_with(self, name: str) -> list[int]:
        return _between(self._backwards, name[::-1])


def _between(entries: list[tuple[str, int]], name: str) -> list[int]:
    begin, end = bisect_left(entries, (name,)), bisect_left(entries, (name + _LAST,))
    return [token for _, token in entries[begin:end]]


vocabulary_of = lru_cache(maxsize=4)(Vocabulary)


def _is_word(name: str) -> bool:
    """Return True for what no text has twice without a space: a letter and more. A
    bracket, a digit or a letter may well stand there twice."""
    return len(name) > 1 and re.search("[A-Za-z]", name) is not None


@dataclass(frozen=True)
class Edge:
    """A given token that became a part of the hole."""

    name: str
    """The token as the tokenizer names it."""
    text: str
    tokens: tuple[int, ...]
    """Tokens that may stand in its place."""
    given: tuple[int, ...] = ()
    """The tokens whose text it is."""


@dataclass(frozen=True)
class Edges:
    """The edges of one hole. None: the token there is no part of a word, or no token
    goes on from it.
    """

    before: Edge | None = None
    behind: Edge | None = None
    both: tuple[int, ...] = ()
    """Tokens that begin and end as both say."""

    @property
    def count(self) -> int:
        return len([edge for edge in (self.before, self.behind) if edge is not None])

    @property
    def fewest(self) -> int:
        """Tokens of the shortest hole."""
        return 1 if self.both else self.count

    @property
    def names(self) -> tuple[str, str]:
        """The names of both."""
        return (
            self.before.name if self.before else "",
            self.behind.name if self.behind else "",
        )

    @property
    def texts(self) -> tuple[str, str]:
        """The texts of both, which are given."""
        return (
            self.before.text if self.before else "",
            self.behind.text if self.behind else "",
        )

    def inside(self, text: str) -> str:
        """The text of a whole hole without them."""
        return _inside(text, *self.texts)

    def allowed(self, first: int, length: int) -> dict[int, tuple[int, ...]]:
        """What a hole may begin and end with, by the place in its template."""
        allowed: dict[int, tuple[int, ...]] = {}
        if self.before is not None:
            allowed[first] = self.before.tokens
        if self.behind is not None:
            allowed[first + length - 1] = self.behind.tokens
        if self.count > 1 and length == 1:
            allowed[first] = self.both
        return allowed


@dataclass(frozen=True)
class Opened:
    """A prompt and a template whose tokens beside the hole are a part of it."""

    prompt: list[int]
    template: Template
    edges: Edges = Edges()
    vocabulary: Vocabulary | None = None
    """Of the tokenizer, if its only hole is one whose end is free."""

    def put(
        self, params: SamplingParams, template: Sequence[int | None], *, rank: int
    ) -> None:
        """Put what the hole of a response may begin and end with into parameters.

        ``rank``: of the length among those of the hole, the best is 0.
        """
        if self.vocabulary is None or None not in template:
            return
        first, length = template.index(None), template.count(None)
        allowed, end = self.edges.allowed(first, length), first + length
        barred = self._repeating(template[end:], first, end, is_first=rank == 0)
        for place in allowed.keys() & barred.keys():
            others = [i for i in allowed[place] if i not in barred[place]]
            allowed[place] = tuple(others) or allowed[place]
            del barred[place]
        carried = {
            "allowed": [*allowed.items()],
            "barred": [(place, sorted(tokens)) for place, tokens in barred.items()],
            "texts": self.edges.texts,
        }
        packed = json.dumps(carried).encode()
        params.extra_args = {**(params.extra_args or {}), HOLE_EDGES: packed}

    def _repeating(
        self, behind: Sequence[int | None], first: int, end: int, *, is_first: bool
    ) -> dict[int, set[int]]:
        """By place, tokens that would let a hole end with the begin of the text behind
        it. The best length may have a bracket or a digit there twice.
        """
        vocabulary, (before, last) = self.vocabulary, self.edges.names
        assert vocabulary is not None
        names = [vocabulary.names.get(token, "") for token in behind[:_MOST_REPEATED]]
        text = last + "".join(takewhile(bool, names))
        begins = [text[: size + 1] for size in range(min(len(text), _MOST_REPEATED))]
        inside = {begin[i:] for begin in begins for i in range(len(begin))}
        if is_first:
            begins = [begin for begin in begins if _is_word(begin)]
        barred = {}
        for place, edge in {end - 1: last, end - 1 - bool(last): ""}.items():
            if place < first:
                continue
            opened = len(edge) + (len(before) if place == first else 0)
            tokens = {
                token
                for begin in begins
                for token in vocabulary.ending_with(begin + edge)
                if len(vocabulary.names[token]) >= len(begin) + opened
            }
            if not is_first and place > first and not edge:
                tokens.update(vocabulary.named(inside))
            if tokens:
                barred[place] = tokens
        return barred

    def sizes(self, prompt_length: int, budget: int, max_model_len: int) -> range:
        """Lengths of an open hole in which ``budget`` tokens may be new."""
        most = self.template.budget(
            budget + self.edges.count, prompt_length, max_model_len
        )
        return range(self.edges.fewest, most + 1)

    def probe(self) -> Probe:
        """Asks about the tokens that the hole may begin with, and about the first token
        that was given there.
        """
        edge = self.edges.before
        assert edge is not None
        parts = self.template.parts[: self.template.parts.index(None)]
        before = [token for part in parts if isinstance(part, list) for token in part]
        canvas = [*self.prompt, *before][-_BEFORE:]
        asked = [*edge.tokens, edge.given[0]]
        masked = [len(canvas)] * len(asked)
        return Probe([*canvas, *[0] * _MASKS], masked, asked)


def chosen_openings(ways: Sequence[Sequence[Opened]]) -> Passes[list[Opened]]:
    """The way to open each template: of two, the first if its tokens are more probable
    than the given one.
    """
    compared = [i for i, each in enumerate(ways) if len(each) > 1]
    chosen = [each[-1] for each in ways]
    answers = (yield [ways[i][0].probe() for i in compared]) if compared else []
    for i, answer in zip(compared, answers, strict=True):
        *tokens, given = map(math.exp, answer.asked)
        if sum(tokens) >= given:
            chosen[i] = ways[i][0]
    return chosen


def stops_of(get: Callable[[str], Any]) -> list[str] | None:
    """The stop strings of a request, by its fields; None where it asks about tokens or
    texts that would not be given any more.
    """
    counts = ("logprobs", "structured_outputs", "response_format")
    if any(get(name) is not None and get(name) is not False for name in counts):
        return None
    stop = get("stop")
    return [stop] if isinstance(stop, str) else list(stop or [])


def openings(
    prompt: list[int],
    template: Template,
    tokenizer: Any,
    stops: Sequence[str] | None,
    *,
    in_chat: bool,
) -> list[Opened]:
    """The ways to open the tokens beside the open hole of a template that has no other,
    where they are parts of words; at most two. The prompt of a chat ends with none.
    """
    parts = list(template.parts)
    num_holes = sum(not isinstance(part, list) for part in parts)
    if num_holes != 1 or not template.open_holes or stops is None:
        return [Opened(prompt, template)]
    vocabulary = vocabulary_of(tokenizer)
    if None not in parts:
        return [Opened(prompt, template, vocabulary=vocabulary)]
    place = parts.index(None)
    last = None
    behind = parts[place + 1] if place + 1 < len(parts) else None
    if isinstance(behind, list) and (last := _behind(behind, tokenizer, stops)):
        parts[place + 1] = behind[len(last.given) :]
    given = parts[place - 1] if place else [] if in_chat else prompt
    assert isinstance(given, list)
    ways = []
    for first in (
        _several_before(given, tokenizer, stops),
        _before(given, 1, tokenizer, stops),
    ):
        kept = given[: len(given) - len(first.given)] if first else given
        both = _both(first, last, tokenizer) if first and last else ()
        edges = Edges(first, last, both)
        if place:
            template = Template((*parts[: place - 1], kept, *parts[place:]))
            ways.append(Opened(prompt, template, edges, vocabulary))
        else:
            shorter = prompt if in_chat else kept
            ways.append(Opened(shorter, Template(tuple(parts)), edges, vocabulary))
    return ways if ways[0].edges.before else ways[1:]


def _several_before(
    given: list[int], tokenizer: Any, stops: Sequence[str]
) -> Edge | None:
    """The most tokens at the end of given ones that are the beginning of one token."""
    for count in range(_MOST_OPENED, 1, -1):
        edge = _before(given, count, tokenizer, stops)
        if edge is not None and len(edge.tokens) <= _MOST_COMPARED:
            return edge
    return None


def _before(
    given: list[int], count: int, tokenizer: Any, stops: Sequence[str]
) -> Edge | None:
    if len(given) <= count:
        return None
    vocabulary = vocabulary_of(tokenizer)
    names = [vocabulary.names.get(token, "") for token in given[-count:]]
    name, near = "".join(names), given[-_NEAR:]
    tokens = vocabulary.beginning_with(name) if all(names) else []
    if not {*tokens} - {*given[-count:]}:  # none goes on from the text
        return None
    text = tokenizer.decode(near)[len(tokenizer.decode(near[:-count])) :]
    is_stopped = any(
        stop in text or any(text.endswith(stop[:i]) for i in range(1, len(stop)))
        for stop in stops
    )
    if is_stopped or not re.fullmatch(r" ?\w+| +", text):
        return None
    return Edge(name, text, tuple(tokens), tuple(given[-count:]))


def _behind(given: list[int], tokenizer: Any, stops: Sequence[str]) -> Edge | None:
    if len(given) < 2:  # nothing behind it would say how long the hole is
        return None
    vocabulary = vocabulary_of(tokenizer)
    name = vocabulary.names.get(given[0])
    tokens = vocabulary.ending_with(name) if name else []
    if name is None or not {*tokens} - {given[0]}:  # none goes on to the text
        return None
    text = tokenizer.decode(given[:1])
    is_stopped = any(
        stop in text or any(text.startswith(stop[i:]) for i in range(1, len(stop)))
        for stop in stops
    )
    if is_stopped or not re.fullmatch(r"\w+", text):
        return None
    return Edge(name, text, tuple(tokens), (given[0],))


def _both(before: Edge, behind: Edge, tokenizer: Any) -> tuple[int, ...]:
    names = vocabulary_of(tokenizer).names
    ends = {*behind.tokens}
    return tuple(
        token
        for token in before.tokens
        if token in ends and len(names[token]) >= len(before.name) + len(behind.name)
    )


class TextWithin:
    """The text of a completion without the edges of its hole, as it comes."""

    def __init__(self, before: str, behind: str, *, in_parts: bool) -> None:
        self._before, self._behind, self._in_parts = before, behind, in_parts
        self._text, self._shown = "", 0

    @classmethod
    def of(cls, params: SamplingParams, *, in_parts: bool) -> Self | None:
        """None: the hole has no edges, or what is given beside it comes back too."""
        packed = bytes_in(params, HOLE_EDGES)
        if packed is None or (params.extra_args or {}).get("return_given") is not False:
            return None
        return cls(*json.loads(packed)["texts"], in_parts=in_parts)

    def cut(self, completion: CompletionOutput) -> None:
        """Leave the edges out of the text. What may become the end is held back."""
        text = completion.text
        self._text = self._text + text if self._in_parts else text
        inside = self._text[len(self._before) :]
        is_stopped = isinstance(completion.stop_reason, str)
        if completion.finish_reason is None:
            inside = inside[: max(len(inside) - len(self._behind), 0)]
        elif not is_stopped:
            inside = inside.removesuffix(self._behind)
        completion.text = inside[self._shown :] if self._in_parts else inside
        self._shown = len(inside)


def without_edges(text: str, extra_args: dict[str, Any]) -> str:
    """The text of a whole hole without its edges."""
    packed = extra_args.get(HOLE_EDGES)
    if packed is None:
        return text
    return _inside(text, *json.loads(packed)["texts"])


def _inside(text: str, before: str, behind: str) -> str:
    return text[len(before) :].removesuffix(behind)
