"""The project installs from a wheel, and tells vLLM of its plugin."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.repository.test_imports import CHECKOUT, PROJECT, ROOMS
from tests.support.environments import NEEDS, new_environment

CODE = {
    Path(folder, name).relative_to(CHECKOUT).as_posix()
    for folder, _, names in os.walk(CHECKOUT / "dllm_engine", followlinks=True)
    for name in names
    if name.endswith(".py")
}


def test_top_level_folders_are_not_packages_of_their_own():
    """A `kernels/__init__.py` would shadow the package `kernels` that transformers
    uses.
    """
    for name in ROOMS:
        assert (CHECKOUT / "dllm_engine" / name).readlink() == Path("..", name)
        assert not (CHECKOUT / name / "__init__.py").exists()


def test_lm_evals_entry_point_is_the_model_that_it_registers():
    """Of the settings: lm_eval reads it from a release on that is not out yet."""
    from lm_eval.api.registry import get_model

    named = PROJECT["entry-points"]["lm_eval.models"]["dllm"]
    assert EntryPoint("dllm", named, "lm_eval.models").load() is get_model("dllm")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of the source distribution, built from a copy so that the checkout
    stays clean.
    """
    source = tmp_path_factory.mktemp("source")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    for name in ("dllm_engine", *ROOMS):
        shutil.copytree(
            CHECKOUT / name,
            source / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    build = (
        "import sys; from setuptools.build_meta import build_sdist; "
        "build_sdist(sys.argv[1])"
    )
    subprocess.run(
        [sys.executable, "-c", build, folder],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (sdist,) = folder.iterdir()
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--wheel-dir",
        folder,
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, sdist],
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_wheel_holds_all_code_and_data_under_one_name(wheel):
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"dllm_engine"}
    assert names >= CODE
    data = (
        "py.typed playground/page.html evaluation/paper_tasks.toml check/*.json "
        "demo/*/*"
    )
    files = [
        file
        for pattern in data.split()
        for file in (CHECKOUT / "dllm_engine").glob(pattern)
    ]
    assert {
        file.relative_to(CHECKOUT).as_posix()
        for file in files
        if "__pycache__" not in file.parts
    } <= names
    (written,) = (
        name for name in names if name.endswith(".dist-info/entry_points.txt")
    )
    metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
    description = archive.read(metadata).decode().partition("\n\n")[2]
    assert "docs/canvas.svg)" in description
    assert not re.findall(r"\]\((?!https?://|#)", description)
    groups = configparser.ConfigParser(delimiters="=")
    groups.read_string(archive.read(written).decode())
    stated = PROJECT["entry-points"] | {"console_scripts": PROJECT["scripts"]}
    assert {group: dict(groups[group]) for group in groups.sections()} == stated


@pytest.mark.slow
def test_installed_wheel_works_without_the_checkout(wheel, tmp_path):
    """The wheel goes into an environment of its own; what it needs comes from the one
    that runs this test, whose .pth files (an editable install) are not read.
    """
    python = new_environment(tmp_path / "environment", NEEDS)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run(
        [*pip, "--disable-pip-version-check", wheel], check=True, capture_output=True
    )
    environ = {
        key: value
        for key, value in os.environ.items()
        if key != "PYTHONPATH" and not key.startswith("VLLM_")
    }
    command = [str(python.parent / "dllm"), "generate", "Reverse: Rome Tom Oslo"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "Oslo Tom Rome\n", "")
