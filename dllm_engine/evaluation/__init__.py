"""Evaluation: scores and costs of demo tasks, users' tasks and tasks of
lm-evaluation-harness, compared by cache method.
"""
