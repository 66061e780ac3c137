"""d2Cache (arXiv 2509.23094)."""
