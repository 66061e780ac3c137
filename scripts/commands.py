"""The commands of `scripts/dev.py`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from environment import CHECKOUT, Environment, SetupError

_MINUTES = {"style and types": 2, "fast tests": 6, "slow tests": 8}
"""On two cores that do nothing else."""
DEMO_PROMPT = "Tom=48. Ida=07. Max=31. Give: Ida, Tom"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    options = parser().parse_args(arguments)
    environment = Environment(options.venv)
    try:
        if options.command == "test":
            return test(environment, options)
        return setup(environment, options.extras, options.prompt)
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--venv",
        type=Path,
        metavar="DIR",
        default=Path(os.environ.get("DLLM_VENV") or CHECKOUT / ".venv"),
        help=(
            "where the virtual environment is (default: the variable DLLM_VENV, else "
            ".venv in the checkout)"
        ),
    )
    top = argparse.ArgumentParser(
        prog="scripts/dev.py",
        description=(
            "Sets up this project on a CPU, in a virtual environment of its own, and "
            "runs it."
        ),
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    setup_command = commands.add_parser("setup", parents=[common], help="only install")
    setup_command.set_defaults(prompt=None)
    setup_command.add_argument(
        "--extras",
        nargs="+",
        default=[],
        metavar="NAME",
        help="optional parts of the project, for example: test ray",
    )

    demo_command = commands.add_parser(
        "demo", parents=[common], help="install, then answer a prompt"
    )
    demo_command.set_defaults(extras=[])
    demo_command.add_argument(
        "prompt", nargs="?", default=DEMO_PROMPT, help="default: %(default)r"
    )

    test_command = commands.add_parser(
        "test", parents=[common], help="install, then run the tests"
    )
    test_command.add_argument(
        "--lint", action="store_true", help="check style and types as well, first"
    )
    test_command.add_argument(
        "--slow", action="store_true", help="run the second, slow stage as well"
    )
    test_command.add_argument(
        "--all", action="store_true", help="the same as --lint --slow"
    )
    test_command.add_argument(
        "pytest", nargs="*", metavar="...", help="after --: arguments for pytest"
    )
    return top


def setup(environment: Environment, extras: Sequence[str], prompt: str | None) -> int:
    """Installs, answers a prompt if there is one with the demo model, and says how to
    go on.
    """
    environment.install(extras)
    if prompt is not None:
        print("The demo model answers, in some 10 s on two cores that are free:")
        if status := environment.run("dllm", "generate", prompt):
            return status
    activate = environment.directory / "bin" / "activate"
    if activate.is_relative_to(Path.cwd()):
        activate = activate.relative_to(Path.cwd())
    print("\nTo go on in this shell:")
    print(f"    source {shlex.quote(str(activate))}")
    print('    dllm generate "Reverse: Rome Tom Oslo"')
    return 0


def test(environment: Environment, options: argparse.Namespace) -> int:
    """Runs the wanted stages, says how long each took, and returns the exit status of
    the first that failed.

    Style and types do not keep the tests from running, so that one run shows all there
    is to mend; the slow stage runs only when the fast one passed.
    """
    cores = os.cpu_count() or 1
    # Tests of one file share engines. More processes would need more memory than their
    # tests are worth.
    processes = str(min(cores, 4))
    pytest = f"python -m pytest --dist loadfile --numprocesses {processes} -m".split()
    stages = {"fast tests": [[*pytest, "not slow", *options.pytest]]}
    if options.lint or options.all:
        checks = (
            "ruff check",
            "ruff format --check",
            f"mypy --num-workers {processes} -p dllm_engine",
            "mypy scripts",
            "mypy benchmarks",
            "mypy examples",
            "mypy --explicit-package-bases tests",
        )
        stages = {"style and types": [check.split() for check in checks]} | stages
    if options.slow or options.all:
        # In the order of tests/conftest.py: by number of tests, the few that start most
        # processes would come last. No more of them at once than cores, since servers
        # that stop have only so many seconds for it.
        order = ["--no-loadscope-reorder", "--durations", "15"]
        stages["slow tests"] = [[*pytest, "slow", *order, *options.pytest]]

    print(f"{cores} cores, {processes} processes for the tests. On two free cores:")
    print("; ".join(f"{name} take {_MINUTES[name]} minutes" for name in stages))
    start = time.monotonic()
    environment.install(["eval", "ray", "test"])
    lines = [f"{'installation':16}{time.monotonic() - start:6.0f} s"]
    failures: list[int] = []
    for name, commands in stages.items():
        start = time.monotonic()
        statuses = [environment.run(*command) for command in commands]
        failed = "  FAILED, see above" * any(statuses)
        lines.append(f"{name:16}{time.monotonic() - start:6.0f} s{failed}")
        failures += filter(None, statuses)
        if name == "fast tests" and failed:
            break
    print("", *lines, sep="\n", flush=True)
    return failures[0] if failures else 0
