"""Files of a model's folder that are something else than their names say, or that no model is loaded from."""

import re
from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_POINTER = 1024
_GGUF_NAME = re.compile(r"\.gguf$|[-_]gguf(:|$)", re.IGNORECASE)
NO_GGUF = "GGUF is not supported; take the checkpoint's safetensors"


def check_files(model: str) -> None:
    """Raise ``ValueError`` naming a file of Git LFS that was not downloaded, or GGUF in place of safetensors.

    A name that is neither a folder nor of a GGUF file is left to whoever downloads it.
    """
    folder = Path(model)
    if not folder.is_dir():
        if _GGUF_NAME.search(model):
            raise ValueError(f"model {model!r}: {NO_GGUF}")
        return
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        if path.stat().st_size <= _LARGEST_POINTER and path.read_bytes().startswith(_POINTER):
            raise ValueError(f"{path} is a Git LFS pointer, not the file itself; run git lfs pull in {folder}")
    suffixes = {path.suffix.lower() for path in files}
    if ".gguf" in suffixes and ".safetensors" not in suffixes:
        raise ValueError(f"{folder} holds a *.gguf file and no *.safetensors file; {NO_GGUF}")
