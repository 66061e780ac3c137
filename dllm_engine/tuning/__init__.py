"""The search for the fastest setting of a model within a loss of accuracy, on the user's own tasks."""
