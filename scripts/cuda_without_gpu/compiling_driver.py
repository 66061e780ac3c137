"""A Triton driver for a GPU that is not there: kernels are compiled for it, and launches do nothing."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SHARED_MEMORY = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}
"""KiB that a program can have at most, by compute capability: of the table of compute capabilities in NVIDIA's "CUDA
C++ Programming Guide"."""
MULTIPROCESSORS, TOTAL_MEMORY = 132, 80 << 30
"""Of an H100. The first decides how many programs share a row; what is compiled hardly depends on it."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a kernel."""

    kernel: str
    constants: dict[str, Any]
    """The arguments that it was compiled for."""
    registers: int
    """Of a thread."""
    shared_memory: int
    """Bytes of a program."""
    spilled: int
    """Bytes of a thread's own memory, which is where registers go that are too many."""


class CompilingDriver:
    """Compiles for ``capability`` whatever is launched with it, and keeps what the compiler says.

    Triton's own launcher is what asks it, so types, alignments and constants are found as on a GPU. A kernel with more
    shared memory than the GPU has raises Triton's error.
    """

    def __init__(self, capability: int) -> None:
        self.capability, self.compiled = capability, list[Compiled]()
        self.utils = SimpleNamespace(load_binary=self._load, get_device_properties=self._properties)

    def install(self) -> None:
        """Let Triton and PyTorch take it for the GPU of this process."""
        driver.set_active(self)
        major, minor = divmod(self.capability, 10)
        properties = SimpleNamespace(
            name="a pretended GPU",
            major=major,
            minor=minor,
            multi_processor_count=MULTIPROCESSORS,
            total_memory=TOTAL_MEMORY,
            is_integrated=False,
        )
        patch.object(torch.cuda, "get_device_properties", lambda device=None: properties).start()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Makes what would launch a compiled kernel, which is loaded next."""
        self._constants = {source.fn.arg_names[index]: value for (index, *_), value in source.constants.items()}
        return lambda *arguments: None

    def _properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[self.capability] << 10}

    def _load(self, name: str, binary: bytes, shared_memory: int, device: int) -> tuple[object, object, int, int, int]:
        """Module, function, registers, spilled registers and the most threads."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
        compiled = Compiled(name, self._constants, used["REG"], shared_memory, used["STACK"] + used["LOCAL"])
        self.compiled.append(compiled)
        return object(), object(), compiled.registers, compiled.spilled // 4, 1024
