"""What an engine needs of memory, what there is, and what fits."""
