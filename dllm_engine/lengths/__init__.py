"""Lengths that forward passes choose before a request enters the engine: of holes and
of responses.
"""
