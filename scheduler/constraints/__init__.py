"""What a request's text must match, as an automaton over tokens."""
