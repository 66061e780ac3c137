#!/usr/bin/env python3
"""Makes the folder that `benchmarks/gpu.sh --bundle` takes to a machine without a network.

    python3 scripts/gpu_bundle.py FOLDER                at most 60 MiB, for an image that has PyTorch
    python3 scripts/gpu_bundle.py FOLDER --complete     some GB, for a machine that has nothing but a driver and Python

The small one holds vLLM's Python files, without what is compiled, and what they import beside an image with Python
3.12, PyTorch 2.11, Triton 3.6 and transformers 5.17 (requirements/gpu-bundle.txt). With it the kernels run and the
engine does: its model takes PyTorch's operators where vLLM's are missing. The complete one holds vLLM as it is, and all
it requires.

Needs a package index and nothing but Python.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from environment import CHECKOUT, PYPROJECT, VLLM, SetupError, last_lines

NEEDS = CHECKOUT / "requirements" / "gpu-bundle.txt"
PYTHON = "3.12"
LIMIT_MIB = 60
# pip takes each tag literally: a wheel for glibc 2.17 is another than one for 2.28. Newest first.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)] + [
    f"manylinux{year}_x86_64" for year in (2014, 2010, 1)
]
# Of vLLM's wheel; the rest is compiled, or sources that are compiled when they are first used.
KEPT = (".py", ".json", ".jinja", ".typed")
# vLLM imports this as soon as it finds a GPU, and asks for these two when models are imported. Whoever calls another
# operator is told that there is none.
STAND_IN = "vllm/_C_stable_libtorch.py"
STAND_IN_SOURCE = '''"""Stands in for compiled operators, which this wheel leaves out."""

import torch

_library = torch.library.Library("_C", "FRAGMENT")
for _name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"):
    _library.define(f"{_name}(int capability) -> bool")
    _library.impl(_name, lambda capability: False, "CompositeExplicitAutograd")
'''
# Its import fails without compiled attention, and with it that of all models. Without this line it says which there is.
EDITED = "vllm/vllm_flash_attn/__init__.py"
BEFORE, AFTER = "if not (FA2_AVAILABLE or FA3_AVAILABLE):", "if False:"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="is made; must not hold anything yet")
    parser.add_argument("--complete", action="store_true", help="vLLM as it is, with all it requires")
    parser.add_argument("--python", default=PYTHON, metavar="3.N", help="of that machine (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        if options.complete and options.python != running_python():
            raise SetupError(
                f"--complete for Python {options.python} must be run with that Python, and this is {running_python()}: "
                "pip decides by its own what packages require."
            )
        make_folder(options.folder)
        if options.complete:
            download(options.folder, options.python, [f"vllm=={VLLM}", *project_needs()])
        else:
            make_small(options.folder, options.python)
            check_size(options.folder, LIMIT_MIB)
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.folder}: {len(list(options.folder.iterdir()))} wheels, {size_mib(options.folder):.1f} MiB")
    return 0


def running_python() -> str:
    """Major and minor release."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def make_folder(folder: Path) -> None:
    """Raises `SetupError` unless the folder is new or empty: two versions of a package could not be installed."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SetupError(f"{folder} is not empty. Choose another folder, or delete it.")


def make_small(folder: Path, python: str) -> None:
    """Downloads what the small bundle holds, and leaves out what is compiled of vLLM."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        download(Path(temporary), python, ["--no-deps", f"vllm=={VLLM}"])
        (wheel,) = Path(temporary).iterdir()
        without_compiled(wheel, folder)
    download(folder, python, ["--no-deps", "--requirement", str(NEEDS)])


def download(folder: Path, python: str, what: Iterable[str]) -> None:
    """Runs `pip download` for a machine with Linux on x86-64; raises `SetupError` with the end of its output."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    done = subprocess.run(
        [*command, f"--dest={folder}", *what],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SetupError(f"pip cannot download {' '.join(what)}:\n\n{last_lines(done.stdout)}")


def project_needs() -> list[str]:
    """What this project requires beside vLLM, to be installed and tested."""
    settings = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    project = settings["project"]
    needs: list[str] = settings["build-system"]["requires"] + project["dependencies"]
    return needs + project["optional-dependencies"]["test"]


def without_compiled(wheel: Path, folder: Path) -> Path:
    """Writes a wheel for any machine into `folder`, with the Python files and data of `wheel`; returns its path."""
    name, version = wheel.name.split("-")[:2]
    target = folder / f"{name}-{version}-py3-none-any.whl"
    metadata = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as source:
        files = {
            file: source.read(file)
            for file in source.namelist()
            if file.endswith(KEPT) or file == f"{metadata}/METADATA"
        }
    if BEFORE.encode() not in files[EDITED]:
        raise SetupError(f"{EDITED} of {wheel.name} has no line {BEFORE!r}: this program was made for vLLM {VLLM}.")
    files[EDITED] = files[EDITED].replace(BEFORE.encode(), AFTER.encode())
    files[STAND_IN] = STAND_IN_SOURCE.encode()
    files[f"{metadata}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = io.StringIO()
    rows = [(file, f"sha256={digest(content)}", len(content)) for file, content in files.items()]
    csv.writer(record, lineterminator="\n").writerows([*rows, (f"{metadata}/RECORD", "", "")])
    files[f"{metadata}/RECORD"] = record.getvalue().encode()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made:
        for file, content in files.items():
            made.writestr(file, content)
    return target


def digest(content: bytes) -> str:
    """As a wheel's record spells it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def size_mib(folder: Path) -> float:
    """Of the files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir()) / 2**20


def check_size(folder: Path, limit_mib: float) -> None:
    """Raises `SetupError` naming the largest files if the folder is larger than `limit_mib`."""
    size = size_mib(folder)
    if size > limit_mib:
        largest = sorted(folder.iterdir(), key=lambda file: -file.stat().st_size)[:5]
        listed = ", ".join(f"{file.name} ({file.stat().st_size / 2**20:.1f} MiB)" for file in largest)
        raise SetupError(f"{folder} takes {size:.1f} MiB, more than {limit_mib:.0f}. The largest are {listed}.")


if __name__ == "__main__":
    sys.exit(main())
