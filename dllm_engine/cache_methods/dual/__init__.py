"""Fast-dLLM's DualCache (arXiv 2505.22618)."""
