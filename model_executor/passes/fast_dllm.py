"""Fast-dLLM's caches (arXiv 2505.22618): ``prefix`` keeps what lies before the window, ``dual`` all but the
window."""

from dllm_engine.model_executor.passes.paged import RetentionPass

prefix_pass = dual_pass = RetentionPass
"""Their plans say which positions are kept."""
