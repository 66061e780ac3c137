"""Measuring: machine, floors, a plain baseline, and what ``dllm bench`` runs.

Nothing here is imported by an engine; ``benchmarks/`` uses it as well.
"""
