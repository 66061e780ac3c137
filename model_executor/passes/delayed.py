"""d3LLM's cache (arXiv 2601.07568): keys and values of the prompt and of finished blocks, renewed now and then."""

from dllm_engine.model_executor.layer_pass.paged import RetentionPass

layer_pass = RetentionPass
"""The beginning of the canvas is kept as far as the plan says."""
