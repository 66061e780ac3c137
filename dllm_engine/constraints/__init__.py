"""What the text of a request must be: automata, and graphs of decisions. The front end
builds, checks and packs them; ``model_executor/constraints/`` decodes by them.
"""
