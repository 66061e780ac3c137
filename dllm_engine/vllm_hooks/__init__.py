"""Everything that this package changes in vLLM while it runs. ``table.py`` lists it all."""
