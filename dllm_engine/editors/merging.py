"""Changes of a file by a snippet. In the snippet, comments such as ``# ... existing
code ...`` stand for lines of the file, which are copied.

A part of the snippet between such comments replaces the lines that it shares with the
file, and the lines between those. If a part fits several places equally well, or is a
block that shares no line, forward passes choose the place where it makes the text most
probable.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from dllm_engine.decoding.probe import Probe
from dllm_engine.editors.completions import plain_tokens, tokenizer_of
from dllm_engine.lengths.forward_passes import Passes, served_result
from dllm_engine.request_options.errors import InvalidRequestError

_KEPT = re.compile(
    r"\s*(?:#|//|/\*|<!--|--|;|%)\s*(?:\.\.\.|…).*?\b(?:existing|rest|unchanged|keep)\b"
    r".*|\s*(?:\.\.\.|…)\s*",
    re.IGNORECASE,
)

_ALIKE, _COMPARED_CHARACTERS = 0.6, 200
"""Share of characters that a changed line has in common with the old line, and the
number of characters that are compared.
"""
_EDGE = 4.0
"""Weight of a shared line at the begin or end of a part; other lines have 1. A line
that the file has n times has 1/n of its weight.
"""
_REMOVED = 1 / 24
"""Cost of a line of the file between two shared lines."""
_MOST_PLACES = 64
_SEEN, _NEAR = 96, 8
"""Number of tokens on either side of a place that passes see, and of tokens whose
probability counts.
"""
_SEEN_PART = 64
"""Number of tokens at the begin and at the end of a part that passes see."""
_CHARACTERS = 1024
"""Limit on the characters of a text that is tokenized for passes. A part may have twice
as many.
"""

Encode = Callable[[str], list[int]]


class Merge(NamedTuple):
    """A file, and a snippet with its changes."""

    original: str
    snippet: str

    async def text(self, serving: Any) -> str:
        """The changed file. The served model compares places."""
        tokenizer = tokenizer_of(serving)
        can_compare = serving.model_config.hf_config.family.attention == "full"
        encode = partial(plain_tokens, tokenizer=tokenizer) if can_compare else None
        passes = merged(self.original, self.snippet, encode if tokenizer else None)
        return await served_result(serving.engine_client, passes)


class Place(NamedTuple):
    """Begin and end of the lines of the file that a part replaces."""

    begin: int
    end: int


def merged(original: str, snippet: str, encode: Encode | None) -> Passes[str]:
    """The changed file. ``encode`` gives the tokens of a text; None: no model can
    compare places. Raises ``InvalidRequestError`` for a part without a clear place.
    """
    parts = _parts(snippet)
    if len(parts) == 1:
        return snippet
    line_end = "\n" if original.endswith("\n") else ""
    lines = original.removesuffix("\n").split("\n")
    position = 0
    written: list[str] = []
    for number, part in enumerate(parts):
        if not part:
            continue
        is_first, is_last = number == 0, number == len(parts) - 1
        places = _shared_places(part, lines, position)
        if not places and (is_first or is_last):
            places = [Place(0, 0) if is_first else Place(len(lines), len(lines))]
        places = places or _places_of_block(part, lines, position)
        if len(places) > 1:
            probes = _probes(part, lines, places, encode)
            answers = iter((yield [probe for _, _, probe in probes]))
            gains = [0.0] * len(places)
            for place, sign, _ in probes:
                gains[place] += sign * sum(next(answers).tokens)
            places = [places[gains.index(max(gains))]]
        if not places:
            raise InvalidRequestError(
                f"{_told(part)} shares no line with the file, or only a few within it, "
                f"or one that the file has more than {_MOST_PLACES} times, so that its "
                f"place is not known; repeat lines beside it"
            )
        begin, end = places[0]
        if not is_first:
            written = _joined(written, lines[position:begin])
        written = _joined(written, _as_in_file(part, lines, begin, end))
        position = len(lines) if is_last else end
    if not parts[-1]:
        written = _joined(written, lines[position:])
    return "\n".join(written) + line_end


def _told(part: Sequence[str]) -> str:
    begin = next(filter(str.strip, part))
    return f"the part of the snippet that begins with {begin[:80]!r}"


def _parts(snippet: str) -> list[list[str]]:
    """The parts of the snippet between comments that stand for lines of the file."""
    parts: list[list[str]] = [[]]
    for line in snippet.removesuffix("\n").split("\n"):
        if _KEPT.fullmatch(line):
            parts.append([])
        else:
            parts[-1].append(line)
    return [part if any(map(str.strip, part)) else [] for part in parts]


def _shared_places(part: list[str], lines: list[str], position: int) -> list[Place]:
    """The places from ``position`` on whose lines are most like the part. Empty if the
    part shares no line, or only lines that the file has more than ``_MOST_PLACES``
    times, or less than half of its lines and neither the first nor the last.
    """
    numbers: dict[str, list[int]] = {}
    for number in range(position, len(lines)):
        numbers.setdefault(lines[number].rstrip(), []).append(number)
    numbers.pop("", None)
    first, last = _num_blank(part), len(part) - 1 - _num_blank(part[::-1])
    # For a line of the file, the weight of the shared lines up to it, and the first of
    # them.
    best: dict[int, tuple[float, int]] = {}
    steps: list[int] = []
    """Lines whose weight, without the costs of lines between, exceeds that of all lines
    before them.
    """
    counts: list[tuple[float, int]] = []
    for number, line in enumerate(part):
        shared = numbers.get(line.rstrip(), [])
        if len(shared) > _MOST_PLACES:
            continue
        chains = []
        for place in shared:
            step = bisect_left(steps, place)
            count, begin = counts[step - 1] if step else (0.0, place)
            count -= (place - 1) * _REMOVED if step else 0
            if count <= 0:
                count, begin = 0.0, place
            count += (_EDGE if number in (first, last) else 1) / len(shared)
            chains.append((place, (count + place * _REMOVED, begin)))
        for place, chain in chains:
            best[place] = max(chain, best.get(place, chain))
            step = bisect_left(steps, place)
            if not step or counts[step - 1] < chain:
                behind = step
                while behind < len(steps) and counts[behind] <= chain:
                    behind += 1
                steps[step:behind], counts[step:behind] = [place], [chain]
    ends = {place: count - place * _REMOVED for place, (count, _) in best.items()}
    most = max(ends.values(), default=0.0) - 1e-9
    changed: dict[int, list[Place]] = {0: []}
    for place in sorted(place for place in ends if ends[place] >= most):
        begin, end = best[place][1], place + 1
        own = {line.rstrip() for line in lines[begin:end]} - {""}
        shared = [line.rstrip() in own for line in part]
        is_meant = shared[first] or shared[last] or 2 * sum(shared) > last - first
        if is_meant:
            wide = _widened(begin, end, part, lines, position)
            num_changed = wide.end - wide.begin - (end - begin)
            changed.setdefault(num_changed, []).append(wide)
    return changed[max(changed)]


def _widened(
    begin: int, end: int, part: list[str], lines: list[str], position: int
) -> Place:
    """The place, extended by the lines beside it that the part has changed."""
    lines_of_place = {line.rstrip() for line in lines[begin:end]} - {""}
    shared = [
        number for number, line in enumerate(part) if line.rstrip() in lines_of_place
    ]
    for line in takewhile(str.strip, reversed(part[: shared[0]])):
        begin -= begin > position and _is_like(line, lines[begin - 1])
    for line in takewhile(str.strip, part[shared[-1] + 1 :]):
        end += end < len(lines) and _is_like(line, lines[end])
    return Place(begin, end)


def _is_like(line: str, before: str) -> bool:
    """Return True if ``line`` may be a changed form of the line ``before``."""
    changed, old = (text.strip()[:_COMPARED_CHARACTERS] for text in (line, before))
    if not changed or not old:
        return False
    return SequenceMatcher(None, changed, old).ratio() >= _ALIKE


def _places_of_block(part: list[str], lines: list[str], position: int) -> list[Place]:
    """The places from ``position`` on between blocks with the part's indentation,
    behind the blank lines between them. Empty if the part is not a block.
    """
    first, *others = filter(str.strip, part)
    indent = _indent(first)
    places: list[Place] = []
    if not any(_indent(line) > indent for line in others):
        return places
    above = -1
    for number, line in enumerate([*lines[position:], "end"], position):
        if not line.strip():
            continue
        is_apart = number == len(lines) or not lines[number - 1].strip()
        if is_apart and _indent(line) <= indent <= above:
            places.append(Place(number, number))
        above = _indent(line)
    return places


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _as_in_file(part: list[str], lines: list[str], begin: int, end: int) -> list[str]:
    """The part with the lines and line ends of the file. If it replaces no line, it
    gets as many blank lines behind it as are before it.
    """
    lines_of_place = {line.rstrip(): line for line in lines[begin:end]}
    carriage = "\r" if lines[0].endswith("\r") else ""
    adapted = [
        lines_of_place.get(line.rstrip(), line.rstrip("\r") + carriage) for line in part
    ]
    if begin == end < len(lines):
        missing = _num_blank(lines[:begin][::-1]) - _num_blank(adapted[::-1])
        adapted += [carriage] * missing
    return adapted


def _num_blank(lines: Sequence[str]) -> int:
    return len([*takewhile(lambda line: not line.strip(), lines)])


def _joined(above: list[str], below: list[str]) -> list[str]:
    """Two texts, with as many blank lines between them as the text that has more of
    them there.
    """
    if not any(map(str.strip, above)) or not any(map(str.strip, below)):
        return above + below
    num_above, num_below = _num_blank(above[::-1]), _num_blank(below)
    if num_above >= num_below:
        return above + below[num_below:]
    return above[: len(above) - num_above] + below


def _probes(
    part: list[str], lines: list[str], places: Sequence[Place], encode: Encode | None
) -> list[tuple[int, int, Probe]]:
    """Probes of the text with the part in each place (1), and without it (-1). Each
    probe masks every other token.
    """
    if encode is None or len(places) > _MOST_PLACES:
        who = (
            "a model that attends to the whole canvas can compare them (`dllm models`)"
        )
        raise InvalidRequestError(
            f"{_told(part)} fits {len(places)} places of the file, and "
            + (
                f"only {who}"
                if encode is None
                else f"at most {_MOST_PLACES} are compared"
            )
            + "; repeat lines beside it"
        )
    return [
        (number, sign, probe)
        for number, place in enumerate(places)
        for sign, middle in ((1, part), (-1, lines[place.begin : place.end]))
        for probe in _around(lines, place, middle, encode)
    ]


def _around(
    lines: list[str], place: Place, middle: Sequence[str], encode: Encode
) -> Iterator[Probe]:
    above = "\n".join([*lines[: place.begin], ""])[-_CHARACTERS:]
    below = "\n".join(["", *lines[place.end :]])[1 : _CHARACTERS + 1]
    before, behind = encode(above)[-_SEEN:], encode(below)[:_SEEN]
    text = "\n".join([*middle, ""]) if middle else ""
    if len(text) > 2 * _CHARACTERS:
        text = text[:_CHARACTERS] + text[-_CHARACTERS:]
    seen = encode(text)
    if len(seen) > 2 * _SEEN_PART:
        seen = seen[:_SEEN_PART] + seen[-_SEEN_PART:]
    canvas = before + seen + behind
    counted = range(
        max(len(before) - _NEAR, 0),
        len(canvas) - max(len(behind) - _NEAR, 0),
    )
    for masked in (counted[::2], counted[1::2]):
        if masked:
            yield Probe(canvas, [*masked], [canvas[place] for place in masked])
