"""Everything that this package changes in vLLM while it runs; ``table.py`` lists it.

``cpu_distribution.py`` changes nothing in vLLM: it tells Python where the metadata of
vLLM's CPU build is. vLLM loads it before any other module of this package, so this file
must not import anything.
"""
