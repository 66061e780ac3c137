"""What the checks of operators cover."""

import pytest
import torch

from dllm_engine.check.operators import PAGED, Sizes
from dllm_engine.checkpoints import RELEASED_CONFIGS, load_config
from dllm_engine.kernels.triton.tiles import tiles_by_rule


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", RELEASED_CONFIGS)
def test_attention_is_checked_with_every_tile_of_a_released_model(model, dtype):
    sizes = Sizes.of_model(load_config(model))
    sharing = sizes.num_heads // sizes.num_kv_heads

    def tiles(rows):
        return tiles_by_rule(rows * sharing, sizes.head_dim, dtype)

    assert {tiles(max(rows)) for rows, _ in PAGED} == {tiles(rows) for rows in range(1, 1025)}
