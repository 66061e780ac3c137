"""Random requests, and whether an engine answers them as a plain version of its cache
method does.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dllm_engine import LLM
from dllm_engine.constraints.automaton import Automaton
from dllm_engine.constraints.constraint import Constraint
from dllm_engine.kernels.sampling import NO_TOKEN, uniform
from tests.oracles.decoding import Decoding, Uniform
from tests.support.answers import Request, answers

VALUES = {
    "threshold": (0.2, 0.5, 0.9),
    "factor": (1.0, 3.0),
    "entropy_bound": (0.3, 3.0),
    "margin": (0.1, 0.6),
    "entropy_threshold": (1.0, 2.2),
}
"""Of each rule of parallel unmasking."""
POLICY = {
    "entropy_bound": "entropy",
    "margin": "topk_margin",
    "entropy_threshold": "low_entropy",
}
"""That measures what a rule goes by, where it is no probability."""
COIN_TOSS = 1e-4
"""Decisions closer than this may go the other way by rounding."""


def random_requests(seed: int, count: int, is_dream: bool) -> list[Request]:
    """Lengths that fit nothing, blocks unlike in length, fewer steps than tokens, every
    parallel rule, and several blocks at once."""
    draw = random.Random(seed)
    return [_random_request(draw, is_dream) for _ in range(count)]


def _random_request(draw: random.Random, is_dream: bool) -> Request:
    prompt = [
        draw.randrange(480)
        for _ in range(
            draw.choice([1, 2, draw.randrange(3, 20), draw.randrange(20, 60)])
        )
    ]
    gen_length = draw.randrange(1, 25)
    block_length = min(draw.choice([1, 3, 5, 8, 16, gen_length]), gen_length)
    num_blocks = -(-gen_length // block_length)
    asked: dict[str, Any] = {"gen_length": gen_length, "block_length": block_length}
    by_probability = "maskgit_plus" if is_dream else "low_confidence"
    rule = draw.choice([None, None, None, *VALUES])
    if rule is None:
        asked["steps"] = draw.choice(
            [gen_length, draw.randrange(num_blocks, gen_length + 1)]
        )
        asked["unmasking"] = draw.choice([by_probability, "entropy", "topk_margin"])
    else:
        asked[rule] = draw.choice(VALUES[rule])
        asked["unmasking"] = POLICY.get(rule, by_probability)
        if draw.random() < 0.6:
            asked["block_add_threshold"] = draw.choice([0.0, 0.2, 0.5, 1.0])
    if gen_length > 1 and draw.random() < 0.3:
        asked["response_template"] = _random_template(draw, gen_length)
    if is_dream and draw.random() < 0.3:
        asked |= {"top_p": 0.9, "top_k": 20}
    return prompt, asked


def _random_template(draw: random.Random, gen_length: int) -> list[int | None]:
    """Given tokens and holes in turn, of any length; at least one of each."""
    template: list[int | None] = []
    given = draw.random() < 0.5
    while len(template) < gen_length:
        template += [
            draw.randrange(40) if given else None
            for _ in range(draw.randrange(1, gen_length))
        ]
        given = not given
    template = template[:gen_length]
    return template if None in template else [None, *template[1:]]


SPANS: tuple[dict[str, float], ...] = (
    {
        "span_steps": 1,
        "span_window": 1,
        "span_threshold": 0.6,
        "slow_threshold": 0.7,
        "fast_threshold": 0.4,
    },
    {
        "span_steps": 2,
        "span_threshold": 0.5,
        "span_variance": 4,
        "slow_threshold": 0.9,
        "fast_threshold": 0.9,
    },
    {
        "span_steps": 3,
        "span_window": 3,
        "span_threshold": 0.8,
        "fast_threshold": 0.2,
        "fast_minimum": 3,
    },
    {"span_threshold": 0.4, "slow_threshold": 0.3, "slow_minimum": 4},
)
"""Options of SlowFast sampling."""


def in_spans(requests: list[Request], number: int) -> list[Request]:
    """Some of them by SlowFast sampling, in longer blocks."""
    for i, (_, asked) in enumerate(requests[3::4]):
        of_rules = (*VALUES, "steps", "unmasking", "block_add_threshold")
        for name in of_rules:
            asked.pop(name, None)
        gen_length = 12 + asked["gen_length"]
        asked |= {
            "gen_length": gen_length,
            "block_length": min(gen_length, 4 * asked["block_length"]),
        }
        if "response_template" in asked:
            asked["response_template"] = asked["response_template"] + [None] * 12
        asked |= {
            "slow_fast": SPANS[(i + number) % len(SPANS)],
            "unmasking": "low_confidence",
        }
    return requests


def in_certain_order(requests: list[Request], number: int) -> list[Request]:
    """Some of them by the certainty prior, and with a number of tokens per step, which
    a rule may exceed.
    """
    for i, (_, asked) in enumerate(requests[2::4]):
        if asked["unmasking"] in ("low_confidence", "maskgit_plus", "topk_margin"):
            asked["certainty_sigma"] = (2.0, 10.0)[i % 2]
        asked.pop("steps", None)
        asked["tokens_per_step"] = (2, 3, 1)[(i + number) % 3]
    return requests


def by_blocks(requests: list[Request], number: int) -> list[Request]:
    """Some of them with steps per block, with and without a rule, from left to right,
    and with an entropy budget.
    """
    for i, (_, asked) in enumerate(requests, number):
        if i % 2 and "entropy_bound" in asked:
            asked["entropy_budget"] = asked.pop("entropy_bound")
        elif i % 2 and not asked.keys() & {
            "block_add_threshold",
            "slow_fast",
            "tokens_per_step",
        }:
            if (
                asked.pop("steps", None)
                and i % 4 == 1
                and "certainty_sigma" not in asked
            ):
                asked["unmasking"] = "sequential"
            asked["steps_per_block"] = 1 + i % 5
    return requests


def between_blocks(requests: list[Request]) -> list[Request]:
    """As models can take them whose attention goes by blocks, which may be longer than
    the response.
    """
    for i, (prompt, asked) in enumerate(requests):
        for name in ("response_template", "block_add_threshold"):
            asked.pop(name, None)
        length = asked["block_length"] = (1, 4, 5, 8, 16)[i % 5]
        if "steps" in asked:
            asked["steps"] = max(
                asked["steps"],
                -(-(len(prompt) % length + asked["gen_length"]) // length),
            )
    return requests


def in_constraints(
    requests: list[Request], number: int, vocab_size: int, mask: int
) -> list[Request]:
    """Some of them with random constraints that they can satisfy."""
    draw = random.Random(number)
    for _, asked in requests[1::3]:
        template = asked.get("response_template") or [None] * asked["gen_length"]
        while True:
            automaton = random_automaton(draw, vocab_size, {mask})
            constraint = Constraint(
                automaton, frozenset(asked.get("stop_token_ids", ()))
            )
            if constraint.completable(template, asked.get("min_tokens", 0))[0][0]:
                asked["constraint"] = automaton.packed
                break
    return requests


def random_automaton(
    draw: random.Random, vocab_size: int, never: set[int]
) -> Automaton:
    """``never``: tokens of no class."""
    num_states = draw.randrange(1, 6)
    num_classes = draw.randrange(1, 7)
    class_of = [
        -1 if token in never else draw.randrange(-1, num_classes)
        for token in range(vocab_size)
    ]
    following = [
        [draw.randrange(-1, num_states) for _ in range(num_classes)]
        for _ in range(num_states)
    ]
    accepting = [draw.random() < 0.5 for _ in range(num_states)]
    return Automaton(
        np.array(class_of, np.int32), np.array(following, np.int32), np.array(accepting)
    )


def noise_of(seed: int, vocab_size: int) -> tuple[Uniform, Callable[[int, int], float]]:
    """The engine's random numbers of a request, for tokens and for the order; their own
    tests hold them to plain arithmetic."""

    def draw(forward: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
        return uniform(
            torch.tensor(seed), torch.tensor(forward), torch.tensor(position), tokens
        )

    vocabulary = torch.arange(vocab_size)
    order = torch.tensor(NO_TOKEN)
    return (
        lambda forward, position: draw(forward, position, vocabulary),
        lambda forward, position: float(draw(forward, position, order)),
    )


def any_text(vocab_size: int, never: set[int]) -> Automaton:
    """Accepts every sequence of tokens but those with tokens of ``never``."""
    class_of = [-1 if token in never else 0 for token in range(vocab_size)]
    return Automaton(
        np.array(class_of, np.int32), np.zeros((1, 1), np.int32), np.ones(1, bool)
    )


def assert_answers_as(
    llm: LLM,
    requests: Sequence[Request],
    plain: Callable[[list[int], dict[str, Any]], Decoding],
) -> int:
    """Ask for all requests, which join one another, and for one alone. ``plain``
    decodes one; returns how many were no coin toss."""
    compared = 0
    for request, answer in zip(
        requests, answers(llm, requests, random.Random(len(requests))), strict=True
    ):
        run = plain(*request)
        if run.closest <= COIN_TOSS:
            continue
        compared += 1
        for one in [answer, *(answers(llm, [request]) if compared == 1 else [])]:
            assert one.tokens == run.tokens, request
            assert one.order == run.order, request
            assert one.computed == run.computed, request
            assert one.tokens_computed == answer.tokens_computed, request
            for name, expected in run.traces.items():
                assert one.traces.get(name, []) == expected, (name, request)
    return compared
