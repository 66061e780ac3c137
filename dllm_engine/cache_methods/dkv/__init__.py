"""dKV-Cache-Decode (arXiv 2505.15781)."""
