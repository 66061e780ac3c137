"""Description of the machine on which figures are measured."""

import datetime
import platform
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform

from dllm_engine import __version__


def provenance() -> dict[str, Any]:
    """Machine, versions, threads and date, for result files."""
    current_platform.import_kernels()
    has_gpu = torch.cuda.is_available()
    processor = platform.machine()
    if has_gpu:
        processor = torch.cuda.get_device_name()
    elif name := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
        processor = name[1]
    driver = Path("/proc/driver/nvidia/version")
    return {
        "processor": processor,
        "compute_capability": torch.cuda.get_device_capability() if has_gpu else None,
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else None,
        "vllm": vllm.__version__,
        # Without vLLM's compiled operators, norms and gates run in PyTorch.
        "vllm_operators": hasattr(torch.ops._C, "rms_norm"),
        "dllm_engine": __version__,
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """``provenance`` as one line for the head of a table."""
    return "{processor}, {threads} threads, torch {torch}, vLLM {vllm}, {date}".format(
        **machine
    )
