"""Random decisions over tokens without texts, and what the plain version needs to know
of them.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dllm_engine.constraints.automaton import Automaton
from dllm_engine.constraints.decision import Decision, unpacked_decision
from dllm_engine.decisions.build import GraphBuilder
from dllm_engine.request_options.sampling_params import DECISION
from tests.oracles.decisions import Fields

FIRST_TOKEN, STOP_TOKEN = 20, 60
"""Bounds of the tokens of literal text and choices."""
DIGITS = {b"1": 10, b"2": 11, b"12": 12, b"21": 13, b"112": 14}
"""Tokens of patterns."""


def random_decision(
    rng: random.Random, most_fields: int = 3
) -> tuple[Decision, Fields, list[list[int]]]:
    """A decision with choices of one to three tokens and patterns, its fields, and the
    literal text around them.
    """
    builder, fields, values = GraphBuilder(), {}, []
    literals = [_tokens(rng) for _ in range(rng.randint(2, most_fields + 1))]
    for number, literal in enumerate(literals[:-1]):
        if number and rng.random() < 0.1:
            literal.clear()  # a field follows another one
        builder.literal(literal)
        if rng.random() < 0.3:
            most = rng.randint(1, 3)
            builder.pattern(number, "", _digits(most, len(DIGITS) + FIRST_TOKEN))
            fields[f"f{number}"] = _spellings(most)
            values.append(None)
        else:
            longest = rng.randint(1, 3)
            choices = sorted({tuple(_tokens(rng, longest)) for _ in range(4)})
            builder.choices(number, choices)
            fields[f"f{number}"] = [
                (f"v{i}", [*tokens]) for i, tokens in enumerate(choices)
            ]
            values.append([value for value, _ in fields[f"f{number}"]])
    if rng.random() < 0.2:
        literals[-1] = []
    builder.literal(literals[-1])
    graph = builder.graph()
    text_of = {token: text for text, token in DIGITS.items()}
    spellings = [
        text_of.get(token, b"") for token in np.unique(graph.edges["token"]).tolist()
    ]
    decision = Decision(
        graph, [*fields], values, spellings, 100, [True] * len(fields), 500
    )
    return unpacked_decision(decision.packed), fields, literals


def decision_params(decision: Decision, **options: Any) -> dict[str, Any]:
    """Fields of ``DiffusionParams`` that ask for a decision."""
    return {
        "gen_length": len(decision.template),
        "extra_args": {DECISION: decision.packed},
        **options,
    }


def listed(answer: dict[str, Any]) -> dict[object, float]:
    """The probability of each value of a field."""
    return {each["value"]: each["probability"] for each in answer["distribution"]}


def assert_same_decisions(answers: list[Any], expected: list[Any]) -> None:
    """Completions have the same texts, and fields of the same distributions."""
    for answer, other in zip(answers, expected, strict=True):
        assert list(answer.token_ids) == list(other.token_ids)
        assert answer.diffusion.forward_passes == other.diffusion.forward_passes
        for name, field in answer.diffusion.decision.items():
            assert listed(field) == pytest.approx(
                listed(other.diffusion.decision[name]), abs=1e-4
            )


def assert_fields_are(
    answers: Mapping[str, Any], expected: Mapping[str, dict[object, float]]
) -> None:
    """Fields have these distributions. One of both may list a value that earlier passes
    have made impossible.
    """
    for name, probabilities in expected.items():
        own = listed(answers[name])
        every = dict.fromkeys([*own, *probabilities], 0.0)
        assert every | own == pytest.approx(every | probabilities, abs=1e-4)


def _tokens(rng: random.Random, most: int = 3) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, STOP_TOKEN) for _ in range(rng.randint(1, most))]


def _digits(most: int, vocab_size: int) -> Automaton:
    """Up to ``most`` digits 1 and 2."""
    class_of = np.full(vocab_size, -1, np.int32)
    for digits, token in DIGITS.items():
        class_of[token] = len(digits) - 1
    states = np.arange(most + 1)[:, None] + np.arange(1, 4)
    return Automaton(
        class_of,
        np.where(states <= most, states, -1).astype(np.int32),
        np.arange(most + 1) > 0,
    )


def _spellings(most: int) -> list[tuple[object, list[int]]]:
    texts: list[tuple[tuple[int, ...], bytes]] = [((), b"")]
    for tokens, text in texts:  # grows as it is read
        texts += [
            ((*tokens, t), text + d) for d, t in DIGITS.items() if len(text + d) <= most
        ]
    return [(int(text), [*tokens]) for tokens, text in texts if tokens]
