"""Scores of demo tasks and of lm-evaluation-harness's tasks, with what they cost,
compared by cache method.
"""
