"""Block diffusion (SDAR, arXiv 2510.06303)."""
