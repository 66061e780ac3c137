#!/usr/bin/env python3
"""Makes the folder that `benchmarks/gpu.sh --bundle` takes to a machine without a
network, of at most 60 MiB.

    python3 scripts/gpu_bundle.py FOLDER

It holds vLLM's Python files, without what is compiled, and what they import beside an
image with Python 3.12, PyTorch 2.11, Triton 3.6 and transformers 5.17
(requirements/gpu-bundle.txt). With it the kernels run and the engine does: its model
takes PyTorch's operators where vLLM's are missing.

Needs a package index and nothing but Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from environment import REQUIREMENTS, VLLM, SetupError

NEEDS = REQUIREMENTS / "gpu-bundle.txt"
PYTHON = "3.12"
# pip takes each tag literally: a wheel for glibc 2.17 is another than one for 2.28.
# Newest first.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)] + [
    f"manylinux{year}_x86_64" for year in (2014, 2010, 1)
]
# Of vLLM's wheel; the rest is compiled, or sources that are compiled when they are
# first used.
KEPT = (".py", ".json", ".jinja", ".typed")
# vLLM imports this as soon as it finds a GPU, and asks for these two when models are
# imported. Whoever calls another operator is told that there is none.
STAND_IN = "vllm/_C_stable_libtorch.py"
STAND_IN_SOURCE = '''"""Stands in for compiled operators, which this wheel leaves out."""

import torch

_library = torch.library.Library("_C", "FRAGMENT")
for _name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"):
    _library.define(f"{_name}(int capability) -> bool")
    _library.impl(_name, lambda capability: False, "CompositeExplicitAutograd")
'''
# Its import fails without compiled attention, and with it that of all models. Without
# this line it says which there is.
EDITED = "vllm/vllm_flash_attn/__init__.py"
BEFORE, AFTER = "if not (FA2_AVAILABLE or FA3_AVAILABLE):", "if False:"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="is made; must not hold anything yet")
    folder: Path = parser.parse_args(arguments).folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):  # two versions of a package could not be installed
            raise SetupError(
                f"{folder} is not empty. Choose another folder, or delete it."
            )
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            download(Path(temporary), f"vllm=={VLLM}")
            (wheel,) = Path(temporary).iterdir()
            without_compiled(wheel, folder)
        download(folder, "--requirement", str(NEEDS))
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    wheels = list(folder.iterdir())
    print(
        f"{folder}: {len(wheels)} wheels, "
        f"{sum(wheel.stat().st_size for wheel in wheels) / 2**20:.1f} MiB"
    )
    return 0


def download(folder: Path, *what: str) -> None:
    """Runs `pip download` for the image; raises `SetupError`."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--quiet",
        "--only-binary=:all:",
        "--no-deps",
        "--implementation=cp",
        f"--python-version={PYTHON}",
        *(f"--platform={platform}" for platform in PLATFORMS),
        f"--dest={folder}",
        *what,
    ]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
        raise SetupError(f"pip cannot download {' '.join(what)}; see above")


def without_compiled(wheel: Path, folder: Path) -> Path:
    """Writes a wheel for any machine into `folder`, with the Python files and data of
    `wheel`; returns its path.
    """
    name, version = wheel.name.split("-")[:2]
    target, metadata = (
        folder / f"{name}-{version}-py3-none-any.whl",
        f"{name}-{version}.dist-info",
    )
    with zipfile.ZipFile(wheel) as source:
        kept = [
            file for file in source.namelist() if file.endswith((*KEPT, "METADATA"))
        ]
        files = {file: source.read(file).decode() for file in kept}
    if BEFORE not in files[EDITED]:
        raise SetupError(
            f"{EDITED} of {wheel.name} has no line {BEFORE!r}: this program was made "
            f"for vLLM {VLLM}."
        )
    files[EDITED] = files[EDITED].replace(BEFORE, AFTER)
    files[STAND_IN] = STAND_IN_SOURCE
    files[f"{metadata}/WHEEL"] = (
        "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{metadata}/RECORD"] = ""  # pip lists what it installs
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made:
        for file, content in files.items():
            made.writestr(file, content)
    return target


if __name__ == "__main__":
    sys.exit(main())
