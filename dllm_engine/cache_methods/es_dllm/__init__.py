"""ES-dLLM (arXiv 2603.10088)."""
