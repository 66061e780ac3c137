"""Answers of two tensor-parallel ranks, in real worker processes under vLLM's executors."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Pages = list[list[int]]
"""At each step: pages reserved when it is planned, allocated and reserved after it."""


def answer_sharded(
    checkpoint: Path,
    requests: Sequence[dict[str, Any]],
    *,
    backend: str = "mp",
    aborted: Sequence[dict[str, Any]] = (),
    **engine: Any,
) -> tuple[list[dict[str, Any]], Pages]:
    """What ``answer_cases`` prints. Requests to be ``aborted`` run for two steps before the others."""
    environment = os.environ | {
        # With mp the scheduler is in the program's process, where it can be watched.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if backend == "mp" else "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.answer_cases", str(checkpoint), "2", backend],
        input=json.dumps({"engine": engine, "requests": list(requests), "aborted": list(aborted)}),
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("ANSWERS ", "PAGES ")))
    assert "ANSWERS" in lines, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads(lines["ANSWERS"]), json.loads(lines["PAGES"])
