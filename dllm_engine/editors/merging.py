"""A file, changed as a snippet says that stands for it: comments such as ``# ...
existing code ...`` mean lines of the file, which are copied.
"""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from dllm_engine.request_options.errors import InvalidRequestError

_KEPT = re.compile(
    r"\s*(?:#|//|/\*|<!--|--|;|%)\s*(?:\.\.\.|…).*?\b(?:existing|rest|unchanged|keep)\b"
    r".*|\s*(?:\.\.\.|…)\s*",
    re.IGNORECASE,
)

_ALIKE = 0.6
"""Share of characters that a changed line has in common with the one before."""


def merged(original: str, snippet: str) -> str:
    """The changed file. Raises ``InvalidRequestError`` for a part of the snippet
    between such comments that shares no line with the file, so that nobody can tell
    where it belongs.
    """
    lines, changed = original.splitlines(), snippet.splitlines()
    parts = _parts(changed)
    if len(parts) == 1:
        return snippet
    position, written = 0, []
    for number, part in enumerate(parts):
        is_first, is_last = number == 0, number == len(parts) - 1
        if not part:
            continue
        begin, end = _place(part, lines, position)
        if not is_first:
            written += lines[position:begin]
        written += part
        position = len(lines) if is_last else end
    if not parts[-1]:
        written += lines[position:]
    line_end = "\n" if original.endswith("\n") else ""
    return "\n".join(written) + line_end


def _parts(changed: Sequence[str]) -> list[list[str]]:
    """The lines between comments that stand for the file's own."""
    parts: list[list[str]] = [[]]
    for line in changed:
        if _KEPT.fullmatch(line):
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def _place(part: list[str], lines: list[str], position: int) -> tuple[int, int]:
    """Begin and end of the file's lines that a part takes the place of: from its first
    line that the file has to its last one.
    """
    places = {}
    for number in range(len(lines) - 1, position - 1, -1):
        places[lines[number].rstrip()] = number
    begin: int | None = None
    end = position
    for line in part:
        place = places.get(line.rstrip()) if line.strip() else None
        if place is not None and place >= end:
            begin = place if begin is None else begin
            end = place + 1
        elif begin is not None and end < len(lines) and _is_like(line, lines[end]):
            end += 1
    if begin is None:
        raise InvalidRequestError(
            f"the part of the snippet that begins with {part[0][:80]!r} shares no line "
            f"with the file, so that its place is not known; repeat a line beside it"
        )
    return begin, end


def _is_like(line: str, before: str) -> bool:
    """Return True for a line that is one of the file's, changed."""
    ratio = SequenceMatcher(None, line.strip(), before.strip()).ratio()
    return ratio >= _ALIKE
