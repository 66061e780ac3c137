"""Tables, as text for the terminal and as JSON for files."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart; the first row is the header."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def json_rows(value: Any, depth: int) -> str:
    """JSON with a line for each value at ``depth``, so that a list of rows there reads as a table."""
    if depth == 0 or not value or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, dict):
        (first, last), items = "{}", [f"{json.dumps(key)}: {json_rows(v, depth - 1)}" for key, v in value.items()]
    else:
        (first, last), items = "[]", [json_rows(v, depth - 1) for v in value]
    body = textwrap.indent(",\n".join(items), " ")
    return f"{first}\n{body}\n{last}"
