"""Fast-dLLM's PrefixCache (arXiv 2505.22618)."""
