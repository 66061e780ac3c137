"""Decisions: typed fields with probabilities, from one forward pass or a few."""
