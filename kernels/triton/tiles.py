"""Tiles of the kernel of ``paged_attention``, and the number of programs that share the keys of a row.

Needs no Triton.
"""

import functools
from typing import NamedTuple

import torch

LEAST_KEYS = 128
"""Keys of a program that shares those of a row with others. Fewer would be read sooner than their results are joined:
32 rows of 128 numbers in float32, written and read, are half as many bytes as 128 keys and values in bfloat16."""
MOST_SHARED = 1024
"""The most programs of a launch, without splits, whose keys others may share. No GPU has so many multiprocessors."""


class Tiles(NamedTuple):
    """Tile of one program of the attention kernel, and its resources."""

    block_q: int
    """(row, query head) pairs."""
    block_k: int
    """Keys."""
    num_warps: int
    num_stages: int


@functools.cache
def choose_tiles(head_dim: int, dtype: torch.dtype) -> Tiles:
    """Tiles for any number of rows.

    Few rows read for longer than they compute, so what counts is that the next keys arrive meanwhile: two programs of
    64 KiB of keys and values each fit a multiprocessor of 2022, four times what keeps its memory busy. 64 pairs are
    the fewest of a Hopper's matrix product, which spares it the exchange between warps that fewer would take; so blocks
    of any number of rows share one compiled kernel. On an H200, of nine tiles it is the fastest for 8 and for 64
    requests of 32 rows, and takes 1.03 to 1.2 times as long as the fastest for a single request of 512, 32 or 4 rows.
    """
    if dtype == torch.float32:
        # Four warps would spill what they accumulate.
        return Tiles(32 if head_dim <= 64 else 16, 32, 8 if head_dim > 32 else 4, 1)
    if head_dim > 128:
        return Tiles(64, 32, 8, 2)
    return Tiles(64, 64, 4, 3)


@functools.cache
def choose_splits(num_programs: int, num_keys: int, device: torch.device) -> int:
    """The most programs that share the keys of a row, for ``num_programs`` without splits: two per multiprocessor in
    all, which is how many fit.

    ``num_keys`` is an upper bound. Programs that would have fewer than ``LEAST_KEYS`` of the keys that there are do
    nothing.
    """
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(2 * num_multiprocessors // num_programs, num_keys // LEAST_KEYS))
