"""FreeCache (arXiv 2505.21467, section 3.2.1)."""
