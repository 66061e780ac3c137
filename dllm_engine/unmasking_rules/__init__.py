"""The rules of parallel unmasking of this package. An entry point in ``pyproject.toml``
names each rule of ``rules.py``.
"""
