"""Constraints of a request's text: automata over tokens."""
