"""The rules of parallel unmasking that this package brings. An entry point in
``pyproject.toml`` names each of ``rules.py``.
"""
