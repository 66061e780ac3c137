"""Constraints of a request's text: automata, and graphs of decisions. The front end
builds, checks and packs them, and ``model_executor/constraints/`` uses them to decode.
"""
