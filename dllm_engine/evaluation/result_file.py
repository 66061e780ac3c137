"""A command's results as a JSON file, from which the same command goes on."""

import json
import os
from pathlib import Path
from typing import Any

SCHEMA = 4
"""Number of the layout of result files; raised where a reader of older ones would go wrong."""


def check_folder_of(path: Path | None) -> None:
    """Raise ``ValueError`` for a file that could not be written, as its folder does not exist."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")


class ResultFile:
    """Results of a command of ``dllm`` on a subject: what they depend on, but for what the file tells them apart by.

    ``path`` need not exist; without one, nothing is written. Raises ``ValueError`` for a file of another subject.
    """

    def __init__(self, path: Path | None, command: str, subject: dict[str, Any]) -> None:
        self.path = path
        self.subject = json.loads(json.dumps({"schema": SCHEMA, "of": command, **subject}, default=str))
        self.stored: dict[str, Any] = {}
        """Its content at first."""
        if path is not None and path.suffix != ".json":
            raise ValueError(f"--output {path}: the results are JSON; give the file the ending .json")
        check_folder_of(path)
        if path is None or not path.exists():
            return
        try:
            self.stored = dict(json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no JSON object: {error}; choose another --output") from None
        before = self.stored.get("subject", {})
        for name, value in self.subject.items():
            if before.get(name) != value:
                raise ValueError(
                    f"{path} has results with {name}={before.get(name)!r}, this run has {value!r}; choose another "
                    f"--output, or remove the file"
                )

    def write(self, **values: Any) -> None:
        """Replace the file, so that an interruption leaves the old one or the new one."""
        if self.path is None:
            return
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json.dumps({"subject": self.subject, **values}, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.path)
