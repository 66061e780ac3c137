"""A command's results as a JSON file, from which the same command goes on."""

import json
import os
from pathlib import Path
from typing import Any

from dllm_engine.text import json_rows

SCHEMA = 3
"""Number of the layout of result files; raised where a reader of older ones would go wrong."""


def check_folder_of(path: Path | None) -> None:
    """Raise ``ValueError`` for a file that could not be written, as its folder does not exist."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")


def read_results(path: Path, command: str) -> dict[str, Any]:
    """The content of a file that ``dllm COMMAND`` wrote; raises ``ValueError`` for any other file."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA or stored.get("of", command) != command:
        raise ValueError(
            f"{path} is no result of this version's `dllm {command}`; give another file, or run `dllm {command}` again"
        )
    return stored


class ResultFile:
    """Results of a command of ``dllm`` on a subject.

    Args:
        path: JSON; need not exist. None: nothing is written.
        subject: what results depend on beside what the file tells them apart by.

    Raises:
        ValueError: the file is of another subject, or none of this command.
    """

    def __init__(self, path: Path | None, command: str, subject: dict[str, Any]) -> None:
        self.path, self.command = path, command
        self.subject: dict[str, Any] = json.loads(json.dumps(subject, default=str))
        self.stored: dict[str, Any] = {}
        """Its content at first."""
        if path is not None and path.suffix != ".json":
            raise ValueError(f"--output {path}: the results are JSON; give the file the ending .json")
        check_folder_of(path)
        if path is None or not path.exists():
            return
        self.stored = read_results(path, command)
        before = self.stored.get("subject", {})
        for name, value in self.subject.items():
            if before.get(name) != value:
                raise ValueError(
                    f"{path} has results with {name}={before.get(name)!r}, this run has {value!r}; choose another "
                    f"--output, or remove the file"
                )

    def write(self, **values: Any) -> None:
        """Replace the file, so that an interruption leaves the old one or the new one. Items of lists have a line
        each."""
        if self.path is None:
            return
        written = {"schema": SCHEMA, "of": self.command, "subject": self.subject, **values}
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json_rows(written, depth=2) + "\n", encoding="utf-8")
        os.replace(beside, self.path)
