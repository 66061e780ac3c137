"""No cache."""
