"""A checkpoint's files, checked before they are read."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open


def check_safetensors(model: str) -> None:
    """Raise ``ValueError`` naming the file that is missing from, or damaged in, the model folder ``model``.

    A name that is no local folder is left to vLLM, which downloads it.
    """
    folder = Path(model)
    if not folder.is_dir():
        return
    files = set(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        missing = sorted(path.name for path in wanted if not path.is_file())
        if missing:
            raise ValueError(f"{index}: {', '.join(missing)} is listed but missing from {folder}; copy it there")
        files |= wanted
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file; copy the checkpoint's weights there")
    for path in sorted(files):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or incomplete ({error}); copy it again") from error
