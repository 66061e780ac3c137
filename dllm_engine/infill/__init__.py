"""Filling in: the caller gives some tokens of a response, and the model writes the
others.
"""
