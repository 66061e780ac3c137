"""d3LLM's cache (arXiv 2601.07568)."""
