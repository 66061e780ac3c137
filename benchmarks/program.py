"""Arguments, tables and result files of these programs."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from dllm_engine.evaluation.hardware import machine_line, provenance
from dllm_engine.text import format_table

Rows = list[dict[str, Any]]


def argument_parser(docstring: str) -> argparse.ArgumentParser:
    """A parser with the options of every program."""
    parser = argparse.ArgumentParser(description=docstring.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, help="also write the figures to this JSON file"
    )
    return parser


def report(options: argparse.Namespace, figures: Rows, **sections: Any) -> None:
    """Print the machine, the sections and the figures as a table; write all of it to
    ``--output``.
    """
    machine = provenance()
    print(machine_line(machine))
    for name, section in sections.items():
        print(f"{name}: {_text(section)}")
    columns = list(dict.fromkeys(column for row in figures for column in row))
    cells = [[_text(row.get(column, "")) for column in columns] for row in figures]
    print(f"\nfigures\n{format_table([columns, *cells])}")
    if options.output:
        settings = {k: value for k, value in vars(options).items() if k != "output"}
        content = {"machine": machine, "settings": settings, **sections}
        text = json.dumps(content | {"figures": figures}, indent=1)
        options.output.write_text(f"{text}\n", encoding="utf-8")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
