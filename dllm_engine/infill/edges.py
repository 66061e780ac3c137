"""Words that a cursor has cut: given tokens beside a hole become part of the hole.

A tokenizer that has a token ``print`` never writes ``pri`` before ``nt``, so a model
that sees ``pri`` finds nothing probable behind it. So the token is left out, and the
hole begins with any token whose text begins with ``pri``. The answer is the text behind
``pri``. The end of the hole is treated in the same way.

``pri`` may itself be several tokens. Then the token beside the hole is opened. If a
token begins with the text of several of them, a forward pass compares the probability
of such tokens with that of the given token, and the model chooses whether all of them
are opened.
"""

import json
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, takewhile
from typing import Any

from vllm.sampling_params import SamplingParams

from dllm_engine.decoding.probe import Probe
from dllm_engine.infill.template import Template
from dllm_engine.lengths.forward_passes import Passes
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.sampling_params import HOLE_EDGES

_LAST = "\U0010ffff"
_NEAR = 8
"""Number of tokens that are decoded together with tokens before a hole."""
_MOST_OPENED = 4
"""Limit on the tokens on one side of a hole that are opened together."""
_MOST_COMPARED = 64
"""Limit on the tokens that may stand in the place of several tokens."""
_MOST_REPEATED = 64
"""Number of characters behind a hole that its end must not repeat."""
_SEEN, _MASKS = 256, 4
"""Number of given tokens on either side, and of masks between, in the comparison."""


class Vocabulary:
    """The tokens of a tokenizer except special ones, by their beginnings and by their
    ends.
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


@dataclass(frozen=True)
class Edge:
    """Given tokens beside a hole that are opened."""

    given: tuple[int, ...] = ()
    name: str = ""
    """Text of the given tokens, as the tokenizer writes it."""
    text: str = ""
    tokens: tuple[int, ...] = ()
    """Tokens that may stand in their place."""


NO_EDGE = Edge()


@dataclass(frozen=True)
class Opened:
    """A prompt and a template without the opened tokens."""

    prompt: list[int]
    template: Template
    vocabulary: Vocabulary | None = None
    """The tokenizer's vocabulary, if the template has a single hole whose end is free.
    """
    before: Edge = NO_EDGE
    behind: Edge = NO_EDGE

    @property
    def has_free_end(self) -> bool:
        """Return True for a single hole whose length is chosen from a budget."""
        return self.vocabulary is not None and None in self.template.parts

    @property
    def texts(self) -> tuple[str, str]:
        """The given texts with which a hole begins and ends."""
        return self.before.text, self.behind.text

    @property
    def count(self) -> int:
        """Number of the edges."""
        return bool(self.before.given) + bool(self.behind.given)

    @cached_property
    def both(self) -> tuple[int, ...]:
        """Tokens that fit both edges."""
        if self.count < 2 or self.vocabulary is None:
            return ()
        names, ends = self.vocabulary.names, {*self.behind.tokens}
        shortest = len(self.before.name) + len(self.behind.name)
        return tuple(
            token
            for token in self.before.tokens
            if token in ends and len(names[token]) >= shortest
        )

    def sizes(
        self, prompt_length: int, min_tokens: int, budget: int, max_model_len: int
    ) -> range:
        """Lengths of an open hole in which ``min_tokens`` to ``budget`` tokens may be
        new.
        """
        most = self.template.budget(budget + self.count, prompt_length, max_model_len)
        least = 1 if self.both and not min_tokens else self.count + min_tokens
        if least > most and min_tokens:
            raise InvalidRequestError(
                f"min_tokens={min_tokens}: the hole may have at most "
                f"{most - self.count} tokens; lower min_tokens"
            )
        return range(least, most + 1)

    def put(
        self, params: SamplingParams, template: Sequence[int | None], *, rank: int
    ) -> None:
        """Set the allowed begin and end of the response's hole in the parameters.

        ``rank``: rank of the length among the lengths of the hole, the best is 0. At
        other lengths, masks are left over, and the likeliest tokens there are those
        behind the hole.
        """
        if self.vocabulary is None or None not in template:
            return
        first, length = template.index(None), template.count(None)
        end = first + length
        last_free = end - 1 - bool(self.behind.given)
        barred = []
        if rank and last_free >= first + bool(self.before.given):
            barred = [(last_free, self._repeating(template[end:]))]
        carried = {
            "allowed": [*self._allowed(first, length).items()],
            "barred": barred,
            "texts": self.texts,
        }
        packed = json.dumps(carried).encode()
        params.extra_args = {**(params.extra_args or {}), HOLE_EDGES: packed}

    def _allowed(self, first: int, length: int) -> dict[int, tuple[int, ...]]:
        """The tokens with which a hole may begin and end, by the place in its template."""
        if self.count > 1 and length == 1:
            return {first: self.both}
        places = (first, self.before), (first + length - 1, self.behind)
        return {place: edge.tokens for place, edge in places if edge.given}

    def _repeating(self, behind: Sequence[int | None]) -> list[int]:
        """Tokens with which the end of a hole would repeat the beginning of the text
        behind it, or a token of that text.
        """
        vocabulary = self.vocabulary
        assert vocabulary is not None
        names = [vocabulary.names.get(token, "") for token in behind[:_MOST_REPEATED]]
        text = self.behind.name + "".join(takewhile(bool, names))
        begins = [text[: end + 1] for end in range(min(len(text), _MOST_REPEATED))]
        inside = {begin[start:] for begin in begins for start in range(len(begin))}
        tokens = {*vocabulary.named(inside)}
        return sorted(tokens.union(*map(vocabulary.ending_with, begins)))


@dataclass(frozen=True)
class Openable:
    """A prompt and a template, and the edges that its hole may have."""

    prompt: list[int]
    template: Template
    vocabulary: Vocabulary | None = None
    """As in ``Opened``."""
    before: Sequence[Edge] = (NO_EDGE,)
    behind: Sequence[Edge] = (NO_EDGE,)
    """One or two edges on each side. Of two, the first has more tokens."""

    def opened(self, before: Edge, behind: Edge) -> Opened:
        """Leave out the tokens of these edges."""
        prompt, template = self.prompt, self.template
        if before.given or behind.given:
            left, right = given_around(template)
            kept = (left or prompt)[: len(left or prompt) - len(before.given)]
            right = right[len(behind.given) :]
            template = Template((kept, None, right) if left else (None, right))
            prompt = prompt if left or not before.given else kept
        return Opened(prompt, template, self.vocabulary, before, behind)

    def probes(self) -> Iterator[Probe]:
        """For two edges on a side, a probe for the tokens of the first edge and, last,
        for the given token that is farthest from the hole.
        """
        if len(self.before) < 2 and len(self.behind) < 2:
            return
        opened = self.opened(self.before[0], self.behind[0])
        left, right = given_around(opened.template)
        left = [*self.prompt, *left] if left else opened.prompt
        canvas = [*left[-_SEEN:], *[0] * _MASKS, *right[:_SEEN]]
        for ways, place, farthest in (
            (self.before, len(left[-_SEEN:]), 0),
            (self.behind, len(canvas) - len(right[:_SEEN]) - 1, -1),
        ):
            if len(ways) > 1:
                tokens = [*ways[0].tokens, ways[0].given[farthest]]
                yield Probe(canvas, [place] * len(tokens), tokens)


def given_around(template: Template) -> tuple[list[int], list[int]]:
    """The given tokens on either side of a template's only hole."""
    place = template.parts.index(None)
    sides = template.parts[:place], template.parts[place + 1 :]
    left, right = (list(chain.from_iterable(parts)) for parts in sides)  # type: ignore[arg-type]
    return left, right


def chosen_openings(openables: Sequence[Openable]) -> Passes[list[Opened]]:
    """The templates with their edges. Of two edges on a side, the first is chosen if
    its tokens are more probable than the given token.
    """
    probes = [probe for each in openables for probe in each.probes()]
    answers = iter((yield probes) if probes else ())

    def chosen(ways: Sequence[Edge]) -> Edge:
        if len(ways) == 1:
            return ways[0]
        *tokens, given = map(math.exp, next(answers).tokens)
        return ways[0] if sum(tokens) >= given else ways[1]

    return [each.opened(chosen(each.before), chosen(each.behind)) for each in openables]


def stops_of(get: Callable[[str], Any]) -> list[str] | None:
    """The stop strings in a request's fields. None if the request asks for tokens or
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
) -> Openable:
    """The possible edges of a template's only hole, if it is open and the tokens beside
    it are parts of words. The prompt of a chat does not end with an edge.
    """
    num_holes = sum(not isinstance(part, list) for part in template.parts)
    if num_holes != 1 or not template.open_holes or stops is None:
        return Openable(prompt, template)
    vocabulary = vocabulary_of(tokenizer)
    if None not in template.parts:
        return Openable(prompt, template, vocabulary)
    left, right = given_around(template)
    if not left and not in_chat:
        left = prompt
    before, behind = (
        _edges(given, tokenizer, stops, is_behind=is_behind)
        for given, is_behind in ((left, False), (right, True))
    )
    return Openable(prompt, template, vocabulary, before, behind)


def _edges(
    given: list[int], tokenizer: Any, stops: Sequence[str], *, is_behind: bool
) -> list[Edge]:
    """The edge of the most tokens that are a part of one token, if there are any, and
    the edge of the token beside the hole.
    """
    several = (
        _edge(given, count, tokenizer, stops, is_behind=is_behind)
        for count in range(_MOST_OPENED, 1, -1)
    )
    longest = next((x for x in several if 0 < len(x.tokens) <= _MOST_COMPARED), None)
    single = _edge(given, 1, tokenizer, stops, is_behind=is_behind)
    return [single] if longest is None else [longest, single]


def _edge(
    given: list[int],
    count: int,
    tokenizer: Any,
    stops: Sequence[str],
    *,
    is_behind: bool,
) -> Edge:
    """The edge of ``count`` given tokens. ``NO_EDGE`` if they are not a part of a word,
    or if no token begins with their text.
    """
    # The model chooses the token from the rest of the text.
    if len(given) <= count:
        return NO_EDGE
    vocabulary = vocabulary_of(tokenizer)
    opened = given[:count] if is_behind else given[-count:]
    names = [vocabulary.names.get(token, "") for token in opened]
    fitting_tokens = vocabulary.ending_with if is_behind else vocabulary.beginning_with
    tokens = fitting_tokens("".join(names)) if all(names) else []
    if not {*tokens} - {*opened}:
        return NO_EDGE
    if is_behind:
        text = tokenizer.decode(opened)
    else:
        near = given[-_NEAR:]
        text = tokenizer.decode(near)[len(tokenizer.decode(near[:-count])) :]
    is_stopped = any(
        stop in text
        or any(
            text.startswith(stop[i:]) if is_behind else text.endswith(stop[:i])
            for i in range(1, len(stop))
        )
        for stop in stops
    )
    if is_stopped or not re.fullmatch(r"\w+" if is_behind else r" ?\w+| +", text):
        return NO_EDGE
    return Edge(tuple(opened), "".join(names), text, tuple(tokens))
