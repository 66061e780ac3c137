"""Checks of the files in a model's folder that vLLM reads, before the model is loaded.
Other files are ignored.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    ValidationError,
)
from safetensors import SafetensorError, safe_open

from dllm_engine.text import (
    cut,
    explain,
    one_line,
    shortened,
)

_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_POINTER = 1024
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
"""Types of weights that are not quantized, as safetensors names them."""
_INDEX = "model.safetensors.index.json"
_GENERATION = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
_OBJECTS = (
    "config.json",
    _GENERATION,
    _INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
"""Files that hold one JSON object each."""
_TEXTS = ("tokenizer.model", "merges.txt", "vocab.txt", "chat_template.jinja")
"""Other files of configs and tokenizers."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""JSON escape of a surrogate, which is half a character."""


def _token_ids(value: object) -> object:
    ids = value if isinstance(value, list) else [value]
    if value is None or all(type(i) is int and 0 <= i < 1 << 24 for i in ids):
        return value
    raise ValueError("must be the id of a token, or a list of ids")


TokenIds = Annotated[int | list[int] | None, BeforeValidator(_token_ids)]


class _GenerationDefaults(BaseModel):
    """Keys of ``generation_config.json`` that become defaults of requests."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    temperature: NonNegativeFloat | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    max_new_tokens: PositiveInt | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    eos_token_id: TokenIds = None


class StoredTensor(NamedTuple):
    """Facts about a tensor from a file's header."""

    path: Path
    dtype: str
    size: int
    """Number of elements."""


def check_files(model: str) -> None:
    """Raise ``ValueError`` naming a file in the folder ``model`` that is damaged, or is
    only a Git LFS pointer. Only files that vLLM reads are checked."""
    folder = Path(model)
    if not folder.is_dir():
        return
    for name in (*_OBJECTS, *_TEXTS):
        check_content(folder / name)
    for name in _OBJECTS:
        if (folder / name).exists():
            read_object(folder / name)
    for path in _weight_files(folder):
        check_content(path)
    check_generation_config(folder)


def check_generation_config(folder: Path) -> None:
    """Raise ``ValueError`` naming a value of ``generation_config.json`` that cannot be
    a default of requests.
    """
    path = folder / _GENERATION
    check_content(path)
    if not path.exists():
        return
    stated = read_object(path)
    try:
        _GenerationDefaults.model_validate(stated)
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error, '')}") from None
    _check_readable(path, stated)


def _check_readable(path: Path, stated: dict[str, Any]) -> None:
    """Raise ``ValueError`` naming a key of ``generation_config.json`` that transformers
    cannot read. vLLM lets transformers read the whole file, although the engine uses
    few of the keys.
    """
    from transformers import GenerationConfig  # imported here, because it takes seconds

    def error_about(values: dict[str, Any]) -> Exception | None:
        try:
            GenerationConfig.from_dict(dict(values))
        except Exception as error:  # its checks may raise any error
            return error
        return None

    if (whole := error_about(stated)) is None:
        return
    for name, value in stated.items():
        if (error := error_about({name: value})) is not None:
            raise ValueError(
                f"{path}: {name}={shortened(value)} cannot be read: "
                f"{cut(one_line(error))}"
            ) from None
    raise ValueError(f"{path} cannot be read: {cut(one_line(whole))}") from None


def mask_token_id(model: str, usual: str | None) -> int | None:
    """Id of the mask in the tokenizer of the folder ``model``: the id of its
    ``mask_token``, else of the added token ``usual``; None if no file names one.
    """
    folder = Path(model)
    stated = _object_if_there(folder / "tokenizer_config.json")
    token = stated.get("mask_token") or usual
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    for number, entry in _added_tokens(folder, stated):
        if isinstance(entry, dict) and entry.get("content") == token:
            return number if type(number) is int else None
    return None


def _added_tokens(
    folder: Path, tokenizer_config: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Id and description of each token that was added to a tokenizer, unchecked."""
    added = tokenizer_config.get("added_tokens_decoder")
    if isinstance(added, dict):
        for number, entry in added.items():
            yield int(number) if number.isdecimal() else None, entry
    added = _object_if_there(folder / "tokenizer.json").get("added_tokens")
    if isinstance(added, list):
        for entry in added:
            yield entry.get("id") if isinstance(entry, dict) else None, entry


def _object_if_there(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ``ValueError`` naming the file if it holds
    none.
    """
    _check_regular(path)
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text)
        if _HALF.search(text):  # two halves that belong together can be encoded
            json.dumps(values, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} cannot be read: it must hold a JSON object, not "
            f"{shortened(values)}"
        )
    return values


def check_safetensors(model: str) -> dict[str, StoredTensor]:
    """The tensors in the folder ``model``, by name; empty if vLLM has to download the
    model. Raises ``ValueError`` naming a folder without weights, or a damaged file."""
    folder = Path(model)
    if not folder.is_dir():
        return {}
    files = _weight_files(folder)
    if not files:
        raise ValueError(
            f"{folder} holds no *.safetensors file; copy the checkpoint's weights there"
        )
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for name, tensor in _tensors_in(path):
            if name in tensors:
                raise ValueError(
                    f"{path} holds the tensor {shortened(name)}, as "
                    f"{tensors[name].path.name} does; remove one"
                )
            tensors[name] = tensor
    return tensors


def _tensors_in(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    _check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_slice(name)
                yield (
                    name,
                    StoredTensor(
                        path, tensor.get_dtype(), math.prod(tensor.get_shape())
                    ),
                )
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is damaged or incomplete ({str(error)[:200]}); copy it again"
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    """The files that vLLM loads: the files in the index, or without an index all files
    that are not hidden.
    """
    files = sorted(
        path for path in folder.glob("*.safetensors") if not path.name.startswith(".")
    )
    if not (folder / _INDEX).exists():
        return files
    index = folder / _INDEX
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(
            f"{index}: weight_map={shortened(places)} must map tensors to files"
        )
    for name in places.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(
                f"{index}: weight_map names {shortened(name)}, which is not a file of "
                f"this folder"
            )
    named = {folder / name for name in places.values()}
    for path in sorted(named - set(files)):
        raise ValueError(
            f"{index} names {shortened(path.name)}, which is not in the folder; copy "
            f"it there"
        )
    return sorted(named)


def check_content(path: Path) -> None:
    """Raise ``ValueError`` if a file exists and is a Git LFS pointer, or cannot be
    opened without waiting.
    """
    _check_regular(path)
    if (
        path.exists()
        and path.stat().st_size <= _LARGEST_POINTER
        and path.read_bytes().startswith(_POINTER)
    ):
        raise ValueError(
            f"{path} is a Git LFS pointer, not the file itself; run git lfs pull in "
            f"{path.parent}"
        )


def _check_regular(path: Path) -> None:
    """Raise ``ValueError`` for a file that is not regular: opening a pipe would wait
    for its writer.
    """
    if os.path.lexists(path) and not path.is_file():
        raise ValueError(f"{path} is not a regular file, nor a link to one")
