"""dKV-Cache-Decode (arXiv 2505.15781): K/V of decoded tokens are kept, one step after they were decoded."""

from dllm_engine.model_executor.layer_pass.paged import OverwritePass

layer_pass = OverwritePass
"""Its plans say which rows a step computes."""
