"""From what a request's text must match to an automaton over tokens."""
