"""FreeCache (arXiv 2505.21467): keys and values of the prompt and of finished blocks, computed once and kept."""

from dllm_engine.model_executor.layer_pass.paged import RetentionPass

layer_pass = RetentionPass
"""Each finished block is appended to what pages hold already, as its plan says."""
