"""The attention kernel takes the tiles that were measured on its GPU, and follows a rule elsewhere."""

import json

import pytest
import torch

from dllm_engine.kernels.triton import tiles
from dllm_engine.kernels.triton.tiles import TABLE_FILE, Tiles, choose_tiles, measured_tiles, tiles_by_rule

TABLE = {"9.0": {"128": {"32": [32, 64, 4, 3], "512": [128, 64, 8, 3], "16": [16, 64, 4, 2]}}}
CUDA, BFLOAT16 = torch.device("cuda", 0), torch.bfloat16


@pytest.fixture
def on_h200(monkeypatch):
    """A GPU that the table knows."""
    monkeypatch.setattr(tiles, "_table", lambda: TABLE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    choose_tiles.cache_clear()
    yield
    choose_tiles.cache_clear()


@pytest.mark.parametrize(("pairs", "key"), [(1, "16"), (16, "16"), (17, "32"), (33, "512"), (512, "512")])
def test_an_entry_is_for_all_numbers_of_pairs_up_to_its_own(on_h200, pairs, key):
    assert choose_tiles(pairs, 128, BFLOAT16, CUDA) == Tiles(*TABLE["9.0"]["128"][key])
    assert choose_tiles(pairs, 128, torch.float16, CUDA) == Tiles(*TABLE["9.0"]["128"][key])


@pytest.mark.parametrize(
    ("pairs", "head_dim", "dtype", "device"),
    [
        (513, 128, BFLOAT16, CUDA),
        (32, 64, BFLOAT16, CUDA),
        (32, 128, torch.float32, CUDA),
        (32, 128, BFLOAT16, torch.device("cpu")),
    ],
    ids=["more pairs", "another head size", "another type", "another device"],
)
def test_what_was_not_measured_follows_the_rule(on_h200, pairs, head_dim, dtype, device):
    assert choose_tiles(pairs, head_dim, dtype, device) == tiles_by_rule(pairs, head_dim, dtype)


def test_another_gpu_follows_the_rule():
    assert measured_tiles(TABLE, "8.0", 128, 32) is None


@pytest.mark.parametrize(("head_dim", "num_warps"), [(32, 4), (64, 8), (128, 8), (256, 8)])
def test_in_float32_eight_warps_share_a_tile_that_four_would_spill(head_dim, num_warps):
    """By the registers that compiling reports (scripts/cuda_check.py)."""
    assert {tiles_by_rule(pairs, head_dim, torch.float32).num_warps for pairs in (1, 32, 4096)} == {num_warps}


def test_the_shipped_table_can_be_read():
    for of_capability in json.loads(TABLE_FILE.read_text(encoding="utf-8")).values():
        for head_dim, entries in of_capability.items():
            for pairs, numbers in entries.items():
                assert int(pairs) > 0
                assert int(head_dim) > 0
                assert all(number & (number - 1) == 0 for number in Tiles(*numbers)[:3])
