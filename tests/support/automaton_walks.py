"""Texts through automata over tokens."""

import random
from typing import Any

import numpy as np

from dllm_engine.constraints.automaton import Automaton
from dllm_engine.structured_output.build import BuildInput, Grammar, build
from dllm_engine.structured_output.compiler import Vocabulary

LETTERS = [b"a", b"b", b"c", b"ab", b"ba", b"abc", b"cc", b"aaaa"]
"""Tokens of more than one letter, for several ways to spell a text."""
TOKENS = [bytes([byte]) for byte in range(256)] + LETTERS[3:]
TOKENS += [
    b'"',
    b'", "',
    b'": ',
    b"{}",
    b"[]",
    b"true",
    b"12",
    b"0.5",
    "é".encode(),
    "你好".encode(),
    "é".encode()[1:] + b"a",
]


def built(
    kind: Any,
    text: str,
    tokens: list[bytes] = TOKENS,
    spaces: bool = True,
    max_states: int = 4096,
) -> Automaton:
    return build(
        BuildInput(Grammar(kind, text, spaces), Vocabulary(tokens), max_states, 60)
    )


def accepts(automaton: Automaton, tokens: list[int]) -> bool:
    state = 0
    for token in tokens:
        kind = automaton.class_of[token]
        state = int(automaton.next_state[state, kind]) if kind >= 0 else -1
        if state < 0:
            return False
    return bool(automaton.accepting[state])


def segmented(text: bytes, tokens: list[bytes], choice: random.Random) -> list[int]:
    """One way to spell a text; every byte is a token."""
    spelled = []
    while text:
        fitting = [
            number
            for number, token in enumerate(tokens)
            if token and text.startswith(token)
        ]
        spelled.append(choice.choice(fitting))
        text = text[len(tokens[spelled[-1]]) :]
    return spelled


def walk(
    automaton: Automaton, tokens: list[bytes], choice: random.Random, most: int
) -> bytes:
    """An accepted text: random tokens first, then the fewest that end it."""
    members: dict[int, list[int]] = {}
    for token, kind in enumerate(automaton.class_of.tolist()):
        members.setdefault(kind, []).append(token)
    need = needs(automaton)
    state, text = 0, b""
    for count in range(10_000):
        followers = automaton.next_state[state]
        alive = np.flatnonzero(followers >= 0).tolist()
        if automaton.accepting[state] and (
            not alive or count >= most or choice.random() < 0.1
        ):
            return text
        if count >= most:
            alive = [kind for kind in alive if need[followers[kind]] < need[state]]
        kind = choice.choice(alive)
        state = int(followers[kind])
        text = text + tokens[choice.choice(members[kind])]
    raise AssertionError("no end")


def needs(automaton: Automaton) -> np.ndarray:
    """Fewest tokens from each state to the end of an accepted text; every state has
    some.
    """
    need = np.where(automaton.accepting, 0, np.inf)
    while np.isinf(need).any():
        # No follower is −1, the last number here.
        following = 1 + np.append(need, np.inf)[automaton.next_state].min(axis=1)
        assert (following < need).any(), "a state from which no text ends"
        need = np.minimum(need, following)
    return need
