"""Sparse-dLLM (arXiv 2508.02558)."""
