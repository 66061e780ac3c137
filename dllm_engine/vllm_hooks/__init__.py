"""What this package changes in vLLM."""
