"""Block diffusion (SDAR, arXiv 2510.06303): keys and values of finished blocks, kept for good."""

from dllm_engine.model_executor.layer_pass.paged import RetentionPass

layer_pass = RetentionPass
"""A finished block is appended to what pages hold, while the next one attends to its rows. The batch says where each
row's block ends."""
