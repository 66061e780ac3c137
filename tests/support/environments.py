"""Environments of their own, and packages that are installed beside ours."""

import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

NEEDS = str(distribution("numpy").locate_file(""))
"""The folder of the packages of the environment that runs the tests."""


def new_environment(folder: Path, path_line: str) -> Path:
    """The Python of a new environment without pip. ``path_line``: the line of a .pth
    file that says where everything else comes from. The environment's own packages come
    first."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    (site_packages / "others.pth").write_text(path_line + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def install(
    folder: Path, name: str, modules: Mapping[str, str], **groups: Mapping[str, str]
) -> None:
    """Write an installed package into a folder of Python's path. ``modules``: the
    source of each; ``groups``: the entry points of ``dllm.GROUP``."""
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source, encoding="utf-8")
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    (metadata / "METADATA").write_text(text, encoding="utf-8")
    lines = []
    for group, entries in groups.items():
        lines.append(f"[dllm.{group}]")
        lines += [f"{entry} = {target}" for entry, target in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
