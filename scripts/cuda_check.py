#!/usr/bin/env python3
"""Checks on a machine without a GPU what can be checked there of the path that a GPU takes.

    python3 scripts/cuda_check.py

It makes an environment of its own with vLLM's wheel for CUDA, in some minutes and 8 GB, which later runs find. There
each Triton kernel is compiled for several GPUs, and vLLM's CUDA worker runs over tensors of the CPU. What needs a GPU
is listed as not run. Needs a package index and nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

from environment import CHECKOUT, PYPROJECT, TORCH, VLLM, Environment, SetupError, Step, fingerprint, last_lines

CAPABILITIES = (80, 86, 90, 100, 120)
LIMIT_SECONDS = 3600
"""Of one process of checks."""
NEEDS_A_GPU = {
    "results and speed of Triton kernels": "they are compiled, and launched nowhere; the tests interpret them",
    "the check of kernels before the first request": "it compares results of a GPU",
    "CUDA graphs": "they are captured from a stream of a GPU; the tests record with a stand-in",
    "streams and pinned memory": "PyTorch has none without a driver",
    "vLLM's compiled operators and FlashAttention": "PyTorch's take their place",
    "memory": "what vLLM measures was made up; that it is shared out right is checked",
    "tensor parallelism over NCCL": "the tests run two ranks over Gloo",
}


class CudaEnvironment(Environment):
    """As ``pip install ".[cuda]"`` makes it, with the vLLM that this project is developed with."""

    constraints = None

    def _steps(self, extras: Sequence[str]) -> list[Step]:
        interpreter = self.interpreter
        # With `==`, uv would take a wheel for CPUs (2.13.0+cpu) where it sees one.
        wheels = [f"torch==={TORCH}", f"vllm=={VLLM}"]
        project = ["--no-deps", "--editable", str(CHECKOUT)]
        return [
            Step("environment", f"Making {self.directory}", fingerprint(interpreter), 0.1, self._create),
            Step(
                "vllm",
                f"Installing vLLM {VLLM} for CUDA (about 10 minutes)",
                fingerprint(interpreter, *wheels),
                12.0,
                lambda: self._uv(*wheels),
            ),
            Step(
                "project",
                "Installing dllm-engine from this checkout",
                fingerprint(interpreter, PYPROJECT, *project),
                0.1,
                lambda: self._uv(*project),
            ),
            Step("driver", "Standing in for NVIDIA's driver", fingerprint(interpreter), 0.0, self._make_driver),
        ]

    def _make_driver(self) -> None:
        """Any library under the name of the driver's lets what is linked with that be loaded. Which one does not matter
        while its functions are looked up late, when they are called."""
        (library,) = self.directory.glob("lib/python3.*/site-packages/torch/lib/libc10.so")
        link = self.directory / "driver" / "libcuda.so.1"
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(library)

    def variables(self) -> dict[str, str]:
        variables = super().variables()
        libraries = [str(self.directory / "driver"), *filter(None, [variables.get("LD_LIBRARY_PATH")])]
        return variables | {
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            "TRITON_CACHE_DIR": str(self.directory / "triton"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(self.directory / "vllm"),
        }

    def checks(self, module: str, *arguments: str) -> Iterator[dict[str, Any]]:
        """Runs a module of `cuda_without_gpu` in a process of its own; yields what it says of each check, and a failure
        if it ends before it has said all."""
        log = self.directory / f"{'-'.join([module, *arguments])}.log"
        reader, writer = os.pipe()
        with log.open("w", encoding="utf-8") as output, os.fdopen(reader, encoding="utf-8") as lines:
            process = subprocess.Popen(
                [self.python, "-m", f"scripts.cuda_without_gpu.{module}", str(writer), *arguments],
                env=self.variables(),
                cwd=CHECKOUT,
                pass_fds=[writer],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            os.close(writer)
            timer = Timer(LIMIT_SECONDS, process.kill)
            timer.start()
            try:
                yield from map(json.loads, lines)
                status = process.wait()
            finally:
                timer.cancel()
                process.kill()  # it goes on only where this program was interrupted
        if status:
            reason = f"ended with status {status}; the end of {log}:\n{last_lines(log.read_text(encoding='utf-8'))}"
            yield {"name": "process", "case": module, "result": "FAILED", "reason": reason}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=CHECKOUT / ".venv-cuda", metavar="DIR", help="where it installs")
    parser.add_argument("--only", choices=("kernels", "worker"), help="one half of the checks")
    capabilities = ", ".join(map(str, CAPABILITIES))
    parser.add_argument(
        "--capability", type=int, nargs="+", choices=CAPABILITIES, default=CAPABILITIES, metavar="SM",
        help=f"compile for these GPUs alone, of {capabilities}",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all results, as JSON")
    options = parser.parse_args(arguments)
    environment = CudaEnvironment(options.venv)
    try:
        environment.install()
        return run(environment, options)
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run(environment: CudaEnvironment, options: argparse.Namespace) -> int:
    """Runs the checks that were asked for, with a line for each; 1 if any failed."""
    found: list[dict[str, Any]] = []
    print(f"\n{'RESULT':8} {'CHECK':58} {'REGISTERS':>9} {'SHARED':>9} {'SPILLED':>7} {'TIME':>7}", flush=True)
    for check in all_checks(environment, options):
        found.append(check)
        print(as_line(check), flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps({"vllm": VLLM, "checks": found}, indent=1) + "\n", encoding="utf-8")
    count = Counter(check["result"] for check in found)
    print(f"\n{len(found)} checks: {count['ok']} ok, {count['FAILED']} failed, {count['not run']} not run")
    return 1 if count["FAILED"] else 0


def all_checks(environment: CudaEnvironment, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What came of each, in the order in which they end."""
    if options.only != "kernels":
        yield from environment.checks("worker")
    for capability in options.capability if options.only != "worker" else ():
        for check in environment.checks("kernels", str(capability)):
            yield check | {"name": f"sm_{capability} {check['name']}"}
    for name, reason in NEEDS_A_GPU.items():
        yield {"name": name, "case": "", "result": "not run", "reason": reason}


def as_line(check: dict[str, Any]) -> str:
    """A check of the table: the most that one of its kernels takes, and the reason where it is not well."""
    name = ", ".join(filter(None, [check["name"], check["case"]]))
    figures = ""
    if kernels := check.get("kernels"):
        most = {key: max(kernel[key] for kernel in kernels) for key in ("registers", "shared_memory", "spilled")}
        figures = f"{most['registers']:9} {most['shared_memory'] / 1024:5.1f} KiB {most['spilled']:5} B"
    seconds = f"{check['seconds']:5.0f} s" if "seconds" in check else ""
    reason = check["reason"]
    if check["result"] == "FAILED" and not reason:
        reason = f"{check['error']:g}, and at most {check['bound']:g} are allowed"
    return f"{check['result']:8} {name:58} {figures:27} {seconds}".rstrip() + (f"\n{'':9}{reason}" if reason else "")


if __name__ == "__main__":
    sys.exit(main())
