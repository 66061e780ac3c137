"""Errors and tables as plain text."""

from collections.abc import Sequence

from pydantic import ValidationError

# Whoever raised them did not write for users, so their text alone may say little ("'role'").
_UNEXPECTED = (AssertionError, AttributeError, LookupError, NameError, TypeError)


def one_line(error: Exception) -> str:
    """The message of ``error`` without line breaks, and without the values that pydantic appends to it."""
    if isinstance(error, ValidationError):
        text = "; ".join(
            ": ".join([*(str(part) for part in detail["loc"][:1]), detail["msg"].removeprefix("Value error, ")])
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


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart; the first row is the header."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
