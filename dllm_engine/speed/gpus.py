"""GPUs in figures: what their data sheets promise, and how many programs of our attention kernel they run at once.

Bandwidth and FLOP/s are of NVIDIA's data sheets "NVIDIA H200 Tensor Core GPU", "NVIDIA H100 Tensor Core GPU" (SXM) and
"NVIDIA A100 Tensor Core GPU" (SXM, 80 GB); where they state tensor cores "with sparsity", half of it. Those of the RTX
4090 are of the white paper "NVIDIA Ada GPU Architecture", with float32 accumulation. Multiprocessors are of the white
papers on each architecture; their registers and shared memory of the table of compute capabilities in NVIDIA's "CUDA
C++ Programming Guide".
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class GPU:
    """One GPU; peaks, which no program reaches."""

    bandwidth: float
    """Bytes per second of its memory."""
    flops: float
    """bfloat16 FLOP/s of its tensor cores, without sparsity."""
    multiprocessors: int
    shared_memory: int
    """KiB of a multiprocessor."""
    compiled_for: str
    """The GPU whose figures of the compiler are taken (``COMPILED_TILES``)."""
    registers: int = 65_536
    """32-bit registers of a multiprocessor."""


GPUS = {
    "H200": GPU(4.8e12, 989e12, 132, 228, "sm_90"),
    "H100": GPU(3.35e12, 989e12, 132, 228, "sm_90"),
    "A100": GPU(2.039e12, 312e12, 108, 164, "sm_80"),
    # Compute capability 8.9, whose multiprocessors have the memory and registers of 8.6.
    "RTX4090": GPU(1.008e12, 165.2e12, 128, 100, "sm_86"),
}


class CompiledTile(NamedTuple):
    """A tile of ``paged_attention`` as Triton compiles it for bfloat16 and heads of 128 (docs/gpu.md)."""

    warps: int
    registers: dict[str, int]
    """Of a thread."""
    shared_memory: dict[str, int]
    """KiB of a program."""


COMPILED_TILES = {
    16: CompiledTile(4, {"sm_90": 114, "sm_80": 96, "sm_86": 112}, {"sm_90": 37, "sm_80": 37, "sm_86": 37}),
    32: CompiledTile(4, {"sm_90": 144, "sm_80": 144, "sm_86": 142}, {"sm_90": 42, "sm_80": 42, "sm_86": 42}),
    64: CompiledTile(4, {"sm_90": 202, "sm_80": 210, "sm_86": 212}, {"sm_90": 64, "sm_80": 52, "sm_86": 52}),
    128: CompiledTile(8, {"sm_90": 224, "sm_80": 254, "sm_86": 196}, {"sm_90": 80, "sm_80": 64, "sm_86": 64}),
}
"""By (row, query head) pairs. Where docs/gpu.md has two rows for a tile, the one with more registers."""
TILE_HEAD_DIM = 128
_REGISTER_UNIT, _RESERVED_KIB, _WARP = 8, 1, 32
"""A thread's registers are rounded up, and every program has some shared memory taken off: of the occupancy calculator
of NVIDIA's Nsight Compute, for compute capabilities from 8.0 on."""


def programs_at_once(gpu: GPU, block_q: int) -> int:
    """Programs of the attention kernel that a multiprocessor runs at once, with tiles of so many pairs."""
    tile = COMPILED_TILES[block_q]
    registers = -(-tile.registers[gpu.compiled_for] // _REGISTER_UNIT) * _REGISTER_UNIT * _WARP * tile.warps
    shared_memory = tile.shared_memory[gpu.compiled_for] + _RESERVED_KIB
    return min(gpu.registers // registers, gpu.shared_memory // shared_memory)
