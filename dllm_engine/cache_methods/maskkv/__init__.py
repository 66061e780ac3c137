"""MaskKV (arXiv 2510.09309)."""
