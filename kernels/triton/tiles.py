"""Tiles of the kernel of ``paged_attention``, and the number of programs that share the keys of a row.

Needs no Triton.
"""

import functools
from typing import NamedTuple

import torch

MAX_SPLITS = 32


class Tiles(NamedTuple):
    """Tile of one program of the attention kernel, and its resources."""

    block_q: int
    """(row, query head) pairs."""
    block_k: int
    """Keys."""
    num_warps: int
    num_stages: int


@functools.cache
def choose_tiles(num_pairs: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Tiles for ``num_pairs`` (row, query head) pairs of a KV head.

    Chosen from what the compiler reports: no registers spilled, 96 KiB of shared memory at most, which every GPU since
    2020 has, and keys and values that arrive while the tile before is computed. Up to 256 pairs, a block of 32 rows
    whose heads share KV heads, reading takes longest, and two programs fit a multiprocessor. Beyond that, each key read
    serves more rows.
    """
    if dtype == torch.float32:
        limit, num_stages = 32 if head_dim <= 64 else 16, 1
    elif head_dim > 128:
        limit, num_stages = 64, 2
    else:
        limit, num_stages = 64 if num_pairs <= 256 else 128, 3
    block_q = min(max(16, 1 << (num_pairs - 1).bit_length()), limit)
    # Four warps would spill what they accumulate in float32.
    is_large = head_dim > 128 or block_q > 64 or (dtype == torch.float32 and head_dim > 32)
    return Tiles(block_q, 32, 8 if is_large else 4, num_stages)


@functools.cache
def choose_splits(num_programs: int, num_keys: int, device: torch.device) -> int:
    """For ``num_programs`` without splits, on a GPU."""
    return splits_by_rule(num_programs, num_keys, torch.cuda.get_device_properties(device).multi_processor_count)


def splits_by_rule(num_programs: int, num_keys: int, num_multiprocessors: int) -> int:
    """Programs that share the keys of a row, so that two per multiprocessor run; each gets 128 keys at least.

    Fewer than 512 keys stay together: a second launch, which joins the splits, would take longer than they save.
    """
    if num_keys < 512:
        return 1
    return max(1, min(2 * num_multiprocessors // num_programs, num_keys // 128, MAX_SPLITS))
