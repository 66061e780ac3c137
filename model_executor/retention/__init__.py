"""Retention of prompt or canvas tokens: scorers rate the tokens for each head, and
budgets say how many tokens heads and layers keep."""
