"""Filling in: responses of which the caller gives some tokens and the model writes the
others.
"""
