"""Files of a model's folder that vLLM reads, checked before a model is made of them. All others are not looked at."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dllm_engine.options import shortened

_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_POINTER = 1024
_INDEX = "model.safetensors.index.json"
_OBJECTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", _INDEX)
"""Files that hold one JSON object each."""
_TEXTS = ("*.json", "*.model", "*.txt", "*.jinja")
_DEFAULTS = ("temperature", "top_p", "top_k", "max_new_tokens", "repetition_penalty", "min_p")
"""Numbers of ``generation_config.json`` that become defaults of requests."""


def check_files(model: str) -> None:
    """Raise ``ValueError`` naming a file of the folder ``model`` that vLLM reads and that is damaged, or a pointer to
    the one to download."""
    folder = Path(model)
    if not folder.is_dir():
        return
    texts = {path for pattern in _TEXTS for path in folder.glob(pattern) if not path.name.startswith(".")}
    for path in sorted(texts):
        _check_no_pointer(path)
    for name in _OBJECTS:
        if (folder / name).exists():
            read_object(folder / name)
    for path in _weight_files(folder):
        _check_no_pointer(path)
    if (generation := folder / "generation_config.json").exists():
        stated = read_object(generation)
        for name in _DEFAULTS:
            check_number(generation, name, stated.get(name))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises ``ValueError`` naming a file that holds none."""
    _check_regular(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} cannot be read: it must hold a JSON object, not {shortened(values)}")
    return values


def check_number(path: Path, name: str, value: object) -> None:
    """Raise ``ValueError`` naming a key of a file whose value is neither null nor a finite number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and math.isfinite(value)):  # type: ignore[arg-type]
        raise ValueError(f"{path}: {name}={shortened(value)} must be a finite number")


def check_safetensors(model: str) -> dict[str, str]:
    """Types of the tensors in the model folder ``model``, by name; none for a name that vLLM has to download. Raises
    ``ValueError`` naming a folder without weights, or a damaged file."""
    folder = Path(model)
    if not folder.is_dir():
        return {}
    files = _weight_files(folder)
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file; copy the checkpoint's weights there")
    types: dict[str, str] = {}
    for path in files:
        for name, dtype in _types_in(path):
            types[name] = dtype
    return types


def _types_in(path: Path) -> Iterator[tuple[str, str]]:
    _check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_slice(name).get_dtype()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or incomplete ({str(error)[:200]}); copy it again") from error


def _weight_files(folder: Path) -> list[Path]:
    """The files that vLLM loads: those that the index names, without an index those that are not hidden."""
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if not (folder / _INDEX).exists():
        return files
    index = folder / _INDEX
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: weight_map={shortened(places)} must map tensors to files")
    for name in places.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index}: weight_map names {shortened(name)}, which is no file of this folder")
    named = {folder / name for name in places.values()}
    for path in sorted(named - set(files)):
        raise ValueError(f"{index} names {shortened(path.name)}, which is not in the folder; copy it there")
    return sorted(named)


def _check_regular(path: Path) -> None:
    """Opening a pipe would wait for its writer."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file")


def _check_no_pointer(path: Path) -> None:
    _check_regular(path)
    if path.exists() and path.stat().st_size <= _LARGEST_POINTER and path.read_bytes().startswith(_POINTER):
        raise ValueError(f"{path} is a Git LFS pointer, not the file itself; run git lfs pull in {path.parent}")
