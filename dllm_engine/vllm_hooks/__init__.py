"""Everything that this package changes in vLLM while it runs. ``table.py`` lists it all.

``cpu_distribution.py`` changes nothing of vLLM: it tells Python where the metadata of its CPU build are. vLLM loads it
before anything else of this package, so this file imports nothing.
"""
