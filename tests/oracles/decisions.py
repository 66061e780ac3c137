"""Decisions by enumeration: every accepted sequence of tokens, one after the other."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from types import MappingProxyType

import numpy as np

from tests.oracles.models import PlainModel

Fields = dict[str, list[tuple[object, list[int]]]]
"""Values of each field, and tokens that spell one; a value may be spelled in several
ways.
"""

Spelling = tuple[int, tuple[int, ...]]
"""First position of a field's text in the response, and its tokens."""


@dataclass(frozen=True)
class PlainDecision:
    """Probabilities of the values of each field, and the most probable sequence."""

    probabilities: dict[str, dict[object, float]]
    values: tuple[object, ...]
    spellings: dict[str, Spelling]
    sureness: dict[str, float]
    """Probability that each field has this spelling."""
    probability: float
    mass: float
    """Probability of all accepted sequences together."""
    agreed: list[int | None]
    """The tokens that all of them have at a position; None: not all the same."""


def decide(
    fields: Fields,
    literals: Sequence[list[int]],
    logprobs: np.ndarray,
    ends: Iterable[int],
    committed: Mapping[str, Spelling] = MappingProxyType({}),
) -> PlainDecision:
    """``literals``: tokens before each field, and behind the last. ``logprobs``:
    ``[num_positions, vocab_size]``, 0 where a token is given. ``ends`` fill up what is
    behind a shorter text. Earlier passes wrote ``committed``."""
    end = np.logaddexp.reduce(logprobs[:, [*ends]], axis=1, initial=-np.inf)
    scores, texts, spellings, sequences = [], [], [], []
    for spelled in product(*fields.values()):
        sequence: list[int] = []
        places: dict[str, Spelling] = {}
        for name, literal, (_, tokens) in zip(fields, literals, spelled, strict=False):
            sequence += literal
            places[name] = len(sequence), tuple(tokens)
            sequence += tokens
        sequence += literals[-1]
        if committed.items() <= places.items():
            scores.append(
                logprobs[range(len(sequence)), sequence].sum()
                + end[len(sequence) :].sum()
            )
            texts.append(spelled)
            spellings.append(places)
            sequences.append(sequence)
    shares = np.exp(np.array(scores) - np.logaddexp.reduce(scores))
    probabilities: dict[str, dict[object, float]] = {
        name: defaultdict(float) for name in fields
    }
    for share, spelled in zip(shares.tolist(), texts, strict=True):
        for name, (value, _) in zip(fields, spelled, strict=True):
            probabilities[name][value] += share
    best = int(shares.argmax())
    values = tuple(value for value, _ in texts[best])
    sureness = {
        name: sum(
            share
            for share, places in zip(shares.tolist(), spellings, strict=True)
            if places[name] == spelling
        )
        for name, spelling in spellings[best].items()
    }
    mass = float(np.exp(scores).sum())
    columns = map(set, zip_longest(*sequences))
    agreed = [tokens.pop() if len(tokens) == 1 else None for tokens in columns]
    return PlainDecision(
        *(probabilities, values, spellings[best], sureness),
        *(float(shares[best]), mass, agreed),
    )


def decide_in_passes(
    fields: Fields,
    literals: Sequence[list[int]],
    canvas: Sequence[int | None],
    logits: Callable[[Sequence[int | None]], np.ndarray],
    ends: Iterable[int],
    passes: int,
) -> list[dict[str, dict[object, float]]]:
    """Probabilities of the fields that each pass commits: those whose tokens are all
    decided, and an equal part of the others, the surest. ``logits``: of all positions,
    from a pass over a canvas; at most ``passes`` times.
    """
    committed: dict[str, Spelling] = {}
    answers = []
    while len(committed) < len(fields):
        logprobs = given_masked(canvas, logits(canvas))
        plain = decide(fields, literals, logprobs, ends, committed)
        left = [name for name in fields if name not in committed]
        undecided = []
        for name in left:
            first, tokens = plain.spellings[name]
            if None in canvas[first : first + len(tokens)]:
                undecided.append(name)
        undecided.sort(key=lambda name: -plain.sureness[name])
        later = undecided[max(len(undecided) // (passes - len(answers)), 1) :]
        now = [name for name in left if name not in later]
        answers.append({name: plain.probabilities[name] for name in now})
        committed |= {name: plain.spellings[name] for name in now}
        agreed = decide(fields, literals, logprobs, ends, committed).agreed
        canvas = [*agreed, *canvas[len(agreed) :]]
    return answers


def given_masked(template: Sequence[int | None], logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of masks, and 0 for all tokens of a given position, from logits
    of all positions.
    """
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return np.where([[token is not None] for token in template], 0.0, logprobs)


def logprobs_of(
    model: PlainModel, prompt: list[int], template: Sequence[int | None]
) -> np.ndarray:
    """Log-probabilities of the response to a prompt, from a plain forward pass."""
    response = [model.mask if token is None else token for token in template]
    length = len(prompt) + len(response)
    block_length = model.block_length or 1
    behind = -length % block_length * bool(model.whole_blocks)
    lead = -len(prompt) % block_length * bool(model.counts_back)
    logits = model.predictions(prompt + response + [model.mask] * behind, lead)
    return given_masked(template, logits[len(prompt) : length].double().numpy())
