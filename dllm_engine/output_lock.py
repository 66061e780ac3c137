"""Output files: only one run at a time writes a file, or replaces it as a whole."""

import fcntl
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any


def lock_output(file: IO[Any], path: Path) -> None:
    """Lock an open file for the output ``path`` until it is closed. Raises
    ``ValueError`` if another run has locked it.
    """
    # Otherwise a forked process of an engine would keep the lock when this process is
    # killed.
    os.register_at_fork(after_in_child=file.close)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"another run is writing {path}; wait for it, or choose another output"
        ) from None


class OutputLock(AbstractContextManager["OutputLock"]):
    """Lock of an output that is replaced as a whole. The lock is a separate file beside
    the output, because a replaced file loses its lock. Raises ``ValueError`` if the
    output cannot be written."""

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
        """Return False if another run has removed the lock file after it was opened
        here. The next run would lock a new file.
        """
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def __exit__(self, *error: object) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


def replace_output(path: Path, text: str) -> None:
    """Replace an output by a text. An interruption leaves either the old or the new
    file.
    """
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
