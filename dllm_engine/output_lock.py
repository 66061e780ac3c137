"""Output files: one run writes a file at a time, or replaces it as a whole."""

import fcntl
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any


def lock_output(file: IO[Any], path: Path) -> None:
    """Lock an open file for the output ``path`` until it is closed; raises
    ``ValueError`` if another run has it.
    """
    # An engine's process that is forked would keep the lock when this process is
    # killed.
    os.register_at_fork(after_in_child=file.close)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"another run is writing {path}; wait for it, or choose another output"
        ) from None


class OutputLock(AbstractContextManager["OutputLock"]):
    """The lock of an output that is replaced as a whole. It is a file of its own beside
    the output, because the lock of a file does not pass to its replacement. Raises
    ``ValueError`` if the output cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        try:
            if path.exists():
                path.open("ab").close()
            self._file = self._path.open("ab")
        except OSError as error:
            raise ValueError(
                f"cannot write {path}: {error.filename}: {error.strerror}"
            ) from error
        try:
            lock_output(self._file, path)
            if not self._is_at_its_path():
                raise ValueError(
                    f"another run has just written {path}; run the command again"
                )
        except BaseException:
            self._file.close()
            raise

    def _is_at_its_path(self) -> bool:
        """Return False if the run before removed the file after it was opened here. The
        next run would lock another file.
        """
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def __exit__(self, *error: object) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


def replace_output(path: Path, text: str) -> None:
    """Write a text in place of an output. An interruption leaves the old file or the new
    one.
    """
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
