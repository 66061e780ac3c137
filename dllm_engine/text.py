"""Errors, tables and options as plain text."""

import difflib
import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ByteSize, ValidationError

# Errors that were not written for users: their text alone may say little ("'role'").
_UNEXPECTED = (AssertionError, AttributeError, LookupError, NameError, TypeError)
_MOST_SHOWN = 10
"""Limit on the errors in a message, because a list may have one for each entry."""


def one_line(error: Exception) -> str:
    """The message of ``error`` without line breaks, and without the values that
    pydantic appends to it.
    """
    if isinstance(error, ValidationError):
        text = "; ".join(
            ": ".join(
                [
                    *(str(part) for part in detail["loc"][:1]),
                    detail["msg"].removeprefix("Value error, "),
                ]
            )
            for detail in error.errors()
        )
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = str(error)
    text = " ".join(text.split())
    if not text or isinstance(error, _UNEXPECTED):
        return f"{type(error).__name__}: {text} (dllm --traceback … shows where)"
    return text


def parsed_json(value: Any) -> Any:
    """Parse a value that may be JSON text, because ``vllm_xargs`` takes neither null
    nor objects.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None


def is_text(text: str) -> bool:
    """Return True if the text can be encoded. Python reads invalid UTF-8 as halves of
    characters, which cannot.
    """
    return not any("\ud800" <= character <= "\udfff" for character in text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """End of a message about an unknown name: the closest known name, or nothing."""
    closest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {closest[0]!r}?" if closest else ""


def choices(name: str, known: Iterable[str]) -> str:
    """End of a message about an unknown name: the closest known name, and all names."""
    known = list(known)
    closest = did_you_mean(name, known)
    return f"{f'{closest} Choose' if closest else '; choose'} one of {', '.join(known)}"


def readable_size(number: int) -> str:
    """Bytes as ``14.9GiB``."""
    return ByteSize(number).human_readable()


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart; the first row is the header."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def assignments(options: dict[str, Any]) -> str:
    """Options as ``name=value+name=value``."""
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in options.items()
    }
    return "+".join(f"{name}={text}" for name, text in texts.items())


def method_text(method: str, options: dict[str, Any]) -> str:
    """A cache method and its options in the syntax of ``--methods``."""
    return ":".join(filter(None, (method, assignments(options))))


def explain(error: ValidationError, what: str, known: Iterable[str] = ()) -> str:
    """Errors of all fields as one text. ``what``: a word for a field, such as ``engine
    option``; may be empty. ``known``: names to suggest for an unknown name."""
    known = list(known)
    lines = []
    for detail in error.errors()[:_MOST_SHOWN]:
        name = cut(".".join(str(part) for part in detail["loc"]))
        value = shortened(detail["input"])
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            lines.append(
                f"unknown {what} {name!r}={value}{did_you_mean(name, known)} ({what}s: "
                f"{', '.join(known)})"
            )
        elif not name and detail["type"] == "value_error":  # about several fields
            lines.append(message)
        elif not what and detail["type"] in ("literal_error", "none_required"):
            lines.append(
                f"{name}={value} is not supported, only "
                f"{message.removeprefix('Input should be ')}"
            )
        else:
            lines.append(f"{what} {name or what}={value}: {message}".lstrip())
    if (count := error.error_count()) > _MOST_SHOWN:
        lines.append(f"and {count - _MOST_SHOWN} more errors")
    return "; ".join(lines)


def with_meanings(
    text: str | None, heading: str, options: type[BaseModel], names: Iterable[str]
) -> str:
    """A class's docstring, followed by the descriptions of some ``options``."""
    lines = [
        textwrap.fill(
            f"{name}: {options.model_fields[name].description}",
            108,
            subsequent_indent="    ",
        )
        for name in names
    ]
    return f"{text}\n    {heading}:\n" + textwrap.indent("\n".join(lines), " " * 8)


def cut(text: str) -> str:
    """The start of a text that may be long, such as a key of a damaged file."""
    return text if len(text) <= 200 else f"{text[:200]}…"


def shortened(value: object) -> str:
    """A value in the form that errors show."""
    return cut(repr(value))
