"""The virtual environment of a developer: vLLM for CPUs, this project, and the tools its tests need.

`Environment.install` runs a list of steps. Each step has a fingerprint of everything its outcome depends on; what
has run is kept in a record inside the environment, so a second run repeats only what changed, and an interrupted one
goes on where it stopped.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
NEEDS = CHECKOUT / "requirements" / "cpu.txt"
WITHOUT_NEEDS = CHECKOUT / "requirements" / "cpu-no-deps.txt"
TEST_WITHOUT_NEEDS = CHECKOUT / "requirements" / "test-no-deps.txt"
CONSTRAINTS = CHECKOUT / "requirements" / "constraints.txt"
PYPROJECT = CHECKOUT / "pyproject.toml"
# Installs all this in a quarter of the time that pip takes. pip brings it, from the index that pip is set to.
UV = "0.13.9"
TORCH = "2.13.0"
VLLM = "0.32.0"
GLIBC = (2, 28)
# This checkout, and what lm_eval needs and has no wheels of; pure Python, so that setuptools is all it takes to build.
SOURCE_ONLY = ("dllm-engine", "jieba", "rouge-score", "sqlitedict", "word2number")
# Free space for downloads that are not yet unpacked, in GB.
DOWNLOADS_GB = 0.5
# Variables by which uv is told what pip's configuration says.
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "HTTPS_PROXY",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "timeout": "UV_HTTP_TIMEOUT",
}
# What uv says when it has seen no version of a package at all.
NO_INDEX = ("was not found in the package registry", "was not found in the provided package locations")


class SetupError(Exception):
    """The set-up cannot go on; the message says why and what to do."""


class InstallError(SetupError):
    """pip or uv failed.

    Attributes:
        output: Everything it printed.
    """

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class Step:
    """One part of the installation.

    Attributes:
        name: Key of the step in the record.
        title: What the user reads while it runs.
        fingerprint: Digest of everything the outcome depends on.
        disk_gb: What it adds to the environment, in GB.
        run: Does the work, or raises `SetupError`.
    """

    name: str
    title: str
    fingerprint: str
    disk_gb: float
    run: Callable[[], None]


class Environment:
    """A virtual environment in `directory`, made and kept up to date by `install`.

    The record of the steps that ran also marks the folder as one that this program made and may delete.
    """

    constraints: Path | None = CONSTRAINTS
    """The versions that pip is held to; None: the newest that requirements allow."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.python = self.directory / "bin" / "python"
        self._log = self.directory / "setup.log"
        self._record_file = self.directory / "setup.json"
        # Every step depends on these: making the environment anew empties it.
        self.interpreter = f"{sys.base_prefix} {platform.python_version()} {self.directory} uv {UV}"

    # -- running programs ----------------------------------------------------------------------------------------

    def variables(self) -> dict[str, str]:
        """The process environment for programs of this environment, as after activating it."""
        # Images set PYTHONDONTWRITEBYTECODE; with it each process would compile all that it imports.
        others = ("PYTHONHOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        variables = {key: value for key, value in os.environ.items() if key not in others}
        variables["VIRTUAL_ENV"] = str(self.directory)
        variables["PATH"] = os.pathsep.join([str(self.directory / "bin"), os.environ.get("PATH", os.defpath)])
        # vLLM and some of what it imports report usage unless told not to.
        variables["VLLM_NO_USAGE_STATS"] = variables["DO_NOT_TRACK"] = "1"
        return variables

    def run(self, *command: str | Path, cwd: Path = CHECKOUT) -> int:
        """Shows and runs a program of this environment; returns its exit status."""
        print("$", shlex.join(str(part) for part in command), flush=True)
        program = self.directory / "bin" / command[0]
        return subprocess.run(
            [program, *command[1:]], env=self.variables(), cwd=cwd, stdin=subprocess.DEVNULL
        ).returncode

    def _uv(self, *arguments: str | Path) -> None:
        """Installs with uv as ``pip install`` would.

        Raises:
            InstallError: uv failed; the message holds the end of its output.
        """
        # As with pip, no index comes before another.
        command: list[str | Path] = [self.directory / "bin" / "uv", "pip", "install", "--python", self.python]
        command += ["--no-progress", "--system-certs", "--no-build-isolation", "--index-strategy=unsafe-best-match"]
        command += ["--only-binary=:all:", *(f"--no-binary={name}" for name in SOURCE_ONLY)]
        if self.constraints is not None:
            command += ["--constraint", self.constraints]
        settings = subprocess.run(
            [self.python, "-m", "pip", "config", "list"], env=self.variables(), capture_output=True, text=True
        ).stdout
        # Variables rather than arguments: addresses may hold passwords, and the log shows the command.
        self._logged([*command, *arguments], settings_for_uv(settings) | self.variables())

    def _logged(self, command: Sequence[str | Path], variables: dict[str, str]) -> None:
        """Runs a command with its output in the log, or raises `InstallError`."""
        with self._log.open("a", encoding="utf-8") as log:
            print("$", *command, file=log, flush=True)
            start = log.tell()
            status = subprocess.run(
                command, env=variables, cwd=CHECKOUT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            ).returncode
        if status:
            with self._log.open(encoding="utf-8", errors="replace") as log:
                log.seek(start)
                output = log.read()
            raise InstallError(
                f"the installation failed with exit status {status}. The end of its output:\n\n{last_lines(output)}\n\n"
                f"All of it is in {self._log}.\n{advice(output)}",
                output,
            )

    # -- installing ----------------------------------------------------------------------------------------------

    def install(self, extras: Sequence[str] = ()) -> None:
        """Makes the environment hold vLLM and this project, editable, with the given extras of it.

        Raises:
            SetupError: the machine is not suited, the disk is too full, or a step failed.
        """
        record = self._record()
        # What was asked for before stays installed.
        extras = sorted({*extras, *record.get("extras", "").split()})
        pending = [step for step in self._steps(extras) if record.get(step.name) != step.fingerprint]
        if not pending:
            print(f"Environment {self.directory} is up to date.", flush=True)
            return
        check_machine()
        check_disk_space(self.directory, sum(step.disk_gb for step in pending))
        for number, step in enumerate(pending, start=1):
            print(f"[{number}/{len(pending)}] {step.title} ...", end=" ", flush=True)
            start = time.monotonic()
            try:
                step.run()
            except BaseException:
                print("failed", flush=True)
                raise
            print(f"{time.monotonic() - start:.0f} s", flush=True)
            record[step.name] = step.fingerprint
            self._write_record(record)
        self._write_record(record | {"extras": " ".join(extras)})

    def _record(self) -> dict[str, str]:
        """Which steps have run with which fingerprints; empty for a new environment.

        Raises:
            SetupError: the folder holds something that this program did not make.
        """
        if not self._record_file.exists():
            if self.directory.exists() and (not self.directory.is_dir() or any(self.directory.iterdir())):
                raise SetupError(
                    f"{self.directory} exists and was not made by this program. "
                    "Choose another folder with --venv, or delete it."
                )
            return {}
        try:
            return dict(json.loads(self._record_file.read_text(encoding="utf-8")))
        except ValueError:  # interrupted while it was written
            return {}

    def _write_record(self, record: dict[str, str]) -> None:
        self._record_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    def _steps(self, extras: Sequence[str]) -> list[Step]:
        interpreter = self.interpreter
        target = f"{CHECKOUT}[{','.join(sorted(extras))}]" if extras else str(CHECKOUT)
        steps = [
            Step(
                "environment",
                f"Making a virtual environment in {self.directory} with Python {platform.python_version()}",
                fingerprint(interpreter),
                0.05,
                self._create,
            ),
            Step(
                "torch",
                f"Installing PyTorch {TORCH}",
                fingerprint(interpreter, TORCH),
                0.8,
                self._install_torch,
            ),
            Step(
                "requirements",
                "Installing what vLLM needs",
                fingerprint(interpreter, NEEDS, CONSTRAINTS),
                1.2,
                lambda: self._uv("--requirement", NEEDS),
            ),
            Step(
                "vllm",
                f"Installing vLLM {VLLM} for CPUs",
                fingerprint(interpreter, WITHOUT_NEEDS, VLLM),
                0.7,
                lambda: self._uv("--no-deps", "--requirement", WITHOUT_NEEDS),
            ),
            Step(
                "project",
                "Installing dllm-engine from this checkout" + (f" with {', '.join(extras)}" if extras else ""),
                fingerprint(interpreter, PYPROJECT, CONSTRAINTS, target),
                1.8 if extras else 0.1,
                lambda: self._uv("--editable", target),
            ),
        ]
        if "test" in extras:
            steps.append(
                Step(
                    "test-no-deps",
                    "Installing what only tests use",
                    fingerprint(interpreter, TEST_WITHOUT_NEEDS),
                    0.1,
                    lambda: self._uv("--no-deps", "--requirement", TEST_WITHOUT_NEEDS),
                )
            )
        steps.append(
            Step(
                "check",
                "Checking that vLLM starts and finds this CPU",
                fingerprint(interpreter, TORCH, NEEDS, WITHOUT_NEEDS, CONSTRAINTS),
                0.0,
                self._check,
            )
        )
        return steps

    def _create(self) -> None:
        # The folder itself stays: it may be a mount point or the target of a link.
        self.directory.mkdir(parents=True, exist_ok=True)
        for entry in self.directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        self._write_record({})
        result = subprocess.run([sys.executable, "-m", "venv", self.directory], capture_output=True, text=True)
        if result.returncode:
            raise SetupError(
                f"Python could not make a virtual environment in {self.directory}:\n\n"
                f"{result.stdout}{result.stderr}\n"
                "Where the message speaks of ensurepip, install your distribution's package for it "
                "(python3-venv on Debian and Ubuntu)."
            )
        command: list[str | Path] = [self.python, "-m", "pip", "install"]
        command += ["--disable-pip-version-check", "--no-input", f"uv=={UV}"]
        # A user-wide `pip config set global.user` or `target` would install elsewhere.
        self._logged(command, self.variables() | {"PIP_USER": "0", "PYTHONNOUSERSITE": "1"})

    def _install_torch(self) -> None:
        try:
            self._uv(f"torch=={TORCH}+cpu")
        except InstallError as error:
            if "there is no version of torch" not in error.output:
                raise
            raise SetupError(
                f"uv sees no CPU build of PyTorch (torch {TORCH}+cpu) for Python {platform.python_version()}.\n"
                "The default package index has only the build for CUDA, which takes almost 5 GB and does not work\n"
                "with vLLM's CPU build, so nothing was downloaded. PyTorch has an index of its own for CPU wheels;\n"
                'the page "Get started" of its website shows the address (choose Stable, Linux, Pip, Python, CPU).\n'
                "Put it in front of the same command:\n\n"
                f"    PIP_EXTRA_INDEX_URL=<address> {shlex.join(['python3', *sys.argv])}\n\n"
                "A folder that holds the wheel will do as well: PIP_FIND_LINKS=<folder>."
            ) from error

    def _check(self) -> None:
        program = (
            "import logging; logging.disable()\n"
            "import torch, xgrammar, vllm.entrypoints.cli.main, dllm_engine\n"
            "from vllm.platforms import current_platform\n"
            "current_platform.import_kernels()\n"
            "print(current_platform.device_type, hasattr(torch.ops._C, 'init_cpu_memory_env'))"
        )
        result = subprocess.run(
            [self.python, "-c", program],
            env=self.variables(),
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if result.returncode:
            raise SetupError(
                f"what was installed does not work:\n\n{last_lines(result.stderr)}\n\n"
                f"Delete {self.directory} and run the command again."
            )
        device_type, has_operators = result.stdout.split()[-2:]
        if device_type != "cpu":
            raise SetupError(f"vLLM in {self.directory} chose the platform {device_type!r} instead of 'cpu'.")
        # vLLM only warns when they do not load, and fails later.
        if has_operators != "True":
            raise SetupError(
                f"the compiled part of vLLM does not load in {self.directory}: PyTorch is another build than "
                f"{TORCH}+cpu, or the processor lacks AVX2. Delete the folder and run the command again."
            )


def fingerprint(*parts: str | Path) -> str:
    """A digest of strings and of the contents of files."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else part.encode()
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def last_lines(output: str) -> str:
    """The end of a program's output, indented."""
    return "\n".join("    " + line for line in output.splitlines()[-15:])


def settings_for_uv(settings: str) -> dict[str, str]:
    """Variables for uv that say what ``pip config list`` prints: uv reads no configuration of pip's."""
    values: dict[str, str] = {}
    # Later ones count more.
    for section in ("global.", "install.", ":env:."):
        for line in settings.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(section):
                values[name.removeprefix(section)] = ast.literal_eval(value)
    variables = {variable: values[name] for name, variable in UV_VARIABLES.items() if name in values}
    if "UV_FIND_LINKS" in variables:
        variables["UV_FIND_LINKS"] = ",".join(variables["UV_FIND_LINKS"].split())
    return variables


def advice(output: str) -> str:
    """What to do after pip or uv failed with this output."""
    if "No space left on device" in output:
        return f"The disk is full. {cache_folder()} (UV_CACHE_DIR chooses another folder) keeps what was downloaded."
    signs = (*NO_INDEX, "Request failed", "Failed to fetch", "from versions: none", "NewConnectionError", "SSLError")
    if any(sign in output for sign in signs):
        return (
            "The package index was not reached. Check the network and the settings shown by `pip config list` "
            "(index-url, proxy, cert), then run the command again: it goes on where it stopped."
        )
    if "No solution found" in output:
        return (
            f"There is no such wheel for Python {platform.python_version()} on this machine. "
            "The versions in requirements/constraints.txt were tried with Python 3.11."
        )
    return "Run the command again: it goes on where it stopped. If that does not help, delete the environment first."


def cache_folder() -> Path:
    """Where uv unpacks and keeps what it downloads."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("UV_CACHE_DIR") or Path(caches, "uv"))


def check_machine() -> None:
    """Raises `SetupError` unless vLLM's CPU wheels can run here."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise SetupError(
            f"this set-up supports Linux on x86-64, and this is {system} on {machine}. "
            "A Linux container or virtual machine with x86-64 will do."
        )
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < GLIBC:
        raise SetupError(
            f"the wheels of PyTorch and vLLM need glibc {GLIBC[0]}.{GLIBC[1]} or newer, and this is "
            f"{library or 'another C library'} {version}. Debian 10, Ubuntu 20.04, RHEL 8 and anything newer have it."
        )
    for name, package in (("libnuma.so.1", "libnuma1"), ("libstdc++.so.6", "libstdc++6")):
        try:
            ctypes.CDLL(name)
        except OSError:
            raise SetupError(
                f"vLLM needs the system library {name}, which is not installed. "
                f"Install it with your package manager ({package} on Debian and Ubuntu)."
            ) from None


def check_disk_space(directory: Path, needed_gb: float) -> None:
    """Raises `SetupError` unless there is room for `needed_gb`, in `directory` and where uv keeps what it unpacks."""
    demand = needed_gb + DOWNLOADS_GB
    # On one file system these share their files.
    for folder, setting in {directory: "--venv", cache_folder(): "UV_CACHE_DIR"}.items():
        folder = next(there for there in (folder, *folder.parents) if there.exists())
        free_gb = shutil.disk_usage(folder).free / 1e9
        if free_gb < demand:
            raise SetupError(
                f"not enough disk space: {folder} needs {demand:.1f} GB, and {free_gb:.1f} GB are free there. "
                f"Free some, or choose another place with {setting}."
            )
