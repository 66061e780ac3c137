"""Structured output: from the pattern of a request's text to an automaton over tokens."""
