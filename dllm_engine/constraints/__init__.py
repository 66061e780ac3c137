"""Constraints of a request's text: automata, and graphs of decisions. The front end
builds, checks and packs them; ``model_executor/constraints/`` decodes by them.
"""
