"""Files of a model's folder that Git LFS has not downloaded."""

from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_POINTER = 1024


def check_files(model: str) -> None:
    """Raise ``ValueError`` naming a file of the folder ``model`` that is a pointer to the one to download."""
    folder = Path(model)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file() and path.stat().st_size <= _LARGEST_POINTER and path.read_bytes().startswith(_POINTER):
            raise ValueError(f"{path} is a Git LFS pointer, not the file itself; run git lfs pull in {folder}")
