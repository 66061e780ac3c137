"""Files of a model's folder, checked before a model is made of them. vLLM and transformers check the rest."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_POINTER = 1024


def check_files(model: str) -> None:
    """Raise ``ValueError`` naming a file of the folder ``model`` that is a pointer to the one to download."""
    folder = Path(model)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file() and path.stat().st_size <= _LARGEST_POINTER and path.read_bytes().startswith(_POINTER):
            raise ValueError(f"{path} is a Git LFS pointer, not the file itself; run git lfs pull in {folder}")


def check_safetensors(model: str) -> set[str]:
    """Names of the tensors in the model folder ``model``; none for a name that vLLM has to download. Raises
    ``ValueError`` naming a folder without weights, or a damaged file."""
    folder = Path(model)
    if not folder.is_dir():
        return set()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file; copy the checkpoint's weights there")
    names: set[str] = set()
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                names.update(file.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or incomplete ({error}); copy it again") from error
    return names
