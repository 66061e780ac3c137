"""Frequencies of RoPE."""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dllm_engine.model_executor.models.config_keys import rotary_dim


def inverse_frequencies(
    config: Any, num_positions: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, float]:
    """The angle of a position is the position times these, float32 ``[rotary_dim / 2]``; cosines and sines are times
    the number.

    Args:
        num_positions: the longest sequence, which the base of ``dynamic`` depends on.
    """
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device, seq_len=num_positions)
        return frequencies, scale
    turned = rotary_dim(config, head_dim)
    exponents = torch.arange(0, turned, 2, device=device, dtype=torch.float32) / turned
    return 1.0 / rope["rope_theta"] ** exponents, 1.0
