"""The virtual environment of a developer: vLLM for CPUs, this project, and the tools
its tests need.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
REQUIREMENTS = CHECKOUT / "requirements"
CONSTRAINTS = REQUIREMENTS / "constraints.txt"
PYPROJECT = CHECKOUT / "pyproject.toml"
# Installs all this in a quarter of the time that pip takes. pip brings it, from the
# index that pip is set to.
UV = "0.13.9"
TORCH = "2.13.0"
VLLM = "0.32.0"
# This checkout, and what lm_eval needs and has no wheels of; pure Python, so that
# setuptools is all it takes to build.
SOURCE_ONLY = ("dllm-engine", "jieba", "rouge-score", "sqlitedict", "word2number")
# Variables by which uv is told what pip's configuration says.
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "HTTPS_PROXY",
    "cert": "SSL_CERT_FILE",
}
CHECK = """
import logging; logging.disable()
import torch, xgrammar, vllm.entrypoints.cli.main, dllm_engine
from vllm.platforms import current_platform
current_platform.import_kernels()
assert current_platform.device_type == "cpu", f"vLLM chose the platform {current_platform.device_type!r}"
# vLLM only warns when they do not load, and fails later.
assert hasattr(torch.ops._C, "init_cpu_memory_env"), "vLLM's operators do not load: the processor may lack AVX2"
"""

MEND = "Mend what it says, then run the command again: it goes on where it stopped."


class SetupError(Exception):
    """The set-up cannot go on; the message says why and what to do."""


class Environment:
    """A virtual environment in `directory`, made and kept up to date by `install`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.python = self.directory / "bin" / "python"
        self._record = self.directory / "installed.json"

    def variables(self) -> dict[str, str]:
        """The process environment for programs of this environment, as after activating
        it.
        """
        # Images set PYTHONDONTWRITEBYTECODE; with it each process would compile all
        # that it imports.
        others = ("PYTHONHOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        variables = {
            key: value for key, value in os.environ.items() if key not in others
        }
        variables["VIRTUAL_ENV"] = str(self.directory)
        variables["PATH"] = os.pathsep.join(
            [str(self.directory / "bin"), os.environ.get("PATH", os.defpath)]
        )
        # vLLM and some of what it imports report usage unless told not to.
        variables["VLLM_NO_USAGE_STATS"] = variables["DO_NOT_TRACK"] = "1"
        return variables

    def run(self, *command: str | Path) -> int:
        """Shows and runs a program of this environment; returns its exit status."""
        print("$", shlex.join(str(part) for part in command), flush=True)
        program = self.directory / "bin" / command[0]
        return subprocess.run(
            [program, *command[1:]],
            env=self.variables(),
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
        ).returncode

    def install(self, extras: Sequence[str] = ()) -> None:
        """Makes the environment hold vLLM and this project, editable, with the given
        extras of it.

        uv skips what is installed. The record says what the last run installed, so that
        a second one asks nobody.

        Raises:
            SetupError: the machine is not suited, or a step failed.
        """
        digest = hashlib.sha256(f"{TORCH} {UV}".encode())
        for file in (PYPROJECT, *sorted(REQUIREMENTS.glob("*.txt"))):
            digest.update(file.read_bytes())
        record: dict[str, Any] = {"extras": []}
        if self._record.exists():
            record = json.loads(self._record.read_text())
        # What was asked for before stays installed.
        wanted = {
            "extras": sorted({*extras, *record["extras"]}),
            "inputs": digest.hexdigest(),
        }
        if wanted == record:
            print(f"Environment {self.directory} is up to date.", flush=True)
            return
        check_machine()
        self._create()
        self._install_torch()
        self._uv("what vLLM needs", "--requirement", REQUIREMENTS / "cpu.txt")
        self._uv(
            "vLLM for CPUs",
            "--no-deps",
            "--requirement",
            REQUIREMENTS / "cpu-no-deps.txt",
        )
        names = f"[{','.join(wanted['extras'])}]" if wanted["extras"] else ""
        self._uv("dllm-engine from this checkout", "--editable", f"{CHECKOUT}{names}")
        print(
            "Checking that vLLM starts, in some 10 s on two cores that are free ...",
            flush=True,
        )
        self._run_step(
            [self.python, "-c", CHECK],
            "vLLM does not start",
            f"Delete {self.directory} and try again.",
        )
        self._record.write_text(json.dumps(wanted), encoding="utf-8")

    def _create(self) -> None:
        """Make the environment, with uv in it, unless it is there."""
        if (self.directory / "bin" / "uv").exists():
            return
        if (
            not (self.directory / "pyvenv.cfg").exists()
            and self.directory.exists()
            and any(self.directory.iterdir())
        ):
            raise SetupError(
                f"{self.directory} exists and is no virtual environment. "
                "Choose another folder with --venv, or delete it."
            )
        print(f"Making a virtual environment in {self.directory} ...", flush=True)
        advice = (
            "If the message speaks of ensurepip: on Debian and Ubuntu, install the "
            "package python3-venv."
        )
        self._run_step(
            [sys.executable, "-m", "venv", self.directory],
            "no virtual environment was made",
            advice,
        )
        options = "-m pip install --quiet --disable-pip-version-check".split()
        # A user-wide `pip config set global.user` or `target` would install elsewhere.
        self._run_step(
            [self.python, *options, f"uv=={UV}"],
            "pip cannot install uv",
            PIP_USER="0",
            PYTHONNOUSERSITE="1",
        )

    def _install_torch(self) -> None:
        advice = (
            f"If there is no version of torch=={TORCH}+cpu: the default package index "
            f"has only the build for CUDA,\nwhich takes almost 5 GB and does not work "
            f"with vLLM's CPU build, so nothing was downloaded. uv\n"
            f"knows PyTorch's own index of CPU wheels, and takes it from there with\n\n"
            f"    UV_TORCH_BACKEND=cpu {shlex.join(['python3', *sys.argv])}\n\n"
            "Or name a mirror of it, PIP_EXTRA_INDEX_URL=<address>, or a folder that "
            "holds the wheel, PIP_FIND_LINKS=<folder>."
        )
        self._uv(f"PyTorch {TORCH}", f"torch=={TORCH}+cpu", advice=advice)

    def _uv(self, what: str, *arguments: str | Path, advice: str = "") -> None:
        """Installs with uv as ``pip install`` would; raises `SetupError`."""
        print(f"Installing {what} ...", flush=True)
        # As with pip, no index comes before another.
        command: list[str | Path] = [
            self.directory / "bin" / "uv",
            "pip",
            "install",
            "--python",
            self.python,
            "--system-certs",
            "--no-build-isolation",
            "--index-strategy=unsafe-best-match",
            "--only-binary=:all:",
            *(f"--no-binary={name}" for name in SOURCE_ONLY),
            "--constraint",
            CONSTRAINTS,
            *arguments,
        ]
        settings = subprocess.run(
            [self.python, "-m", "pip", "config", "list"],
            env=self.variables(),
            capture_output=True,
            text=True,
        ).stdout
        # Variables rather than arguments: addresses may hold passwords.
        variables = settings_for_uv(settings) | self.variables()
        self._run_step(command, f"uv cannot install {what}", advice, **variables)

    def _run_step(
        self,
        command: Sequence[str | Path],
        failure: str,
        advice: str = "",
        **variables: str,
    ) -> None:
        """Runs a command; raises `SetupError` if it fails, whose own
        output says why.
        """
        environment = self.variables() | variables
        if subprocess.run(
            command, env=environment, cwd=CHECKOUT, stdin=subprocess.DEVNULL
        ).returncode:
            raise SetupError(f"{failure}; see above.\n{advice or MEND}")


def settings_for_uv(settings: str) -> dict[str, str]:
    """Variables for uv that say what ``pip config list`` prints: uv reads no
    configuration of pip's.
    """
    values: dict[str, str] = {}
    # Later ones count more.
    for section in ("global.", "install.", ":env:."):
        for line in settings.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(section):
                values[name.removeprefix(section)] = ast.literal_eval(value)
    variables = {
        variable: values[name]
        for name, variable in UV_VARIABLES.items()
        if name in values
    }
    if "UV_FIND_LINKS" in variables:
        variables["UV_FIND_LINKS"] = ",".join(variables["UV_FIND_LINKS"].split())
    return variables


def check_machine() -> None:
    """Raises `SetupError` unless vLLM's CPU wheels can run here."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise SetupError(
            f"this set-up supports Linux on x86-64, and this is {system} on {machine}. "
            "A Linux container or virtual machine with x86-64 will do."
        )
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        raise SetupError(
            "vLLM needs the system library libnuma.so.1, which is not installed. "
            "Install it with your package manager (libnuma1 on Debian and Ubuntu)."
        ) from None
