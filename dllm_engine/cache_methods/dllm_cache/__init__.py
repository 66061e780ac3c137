"""dLLM-Cache (arXiv 2506.06295)."""
