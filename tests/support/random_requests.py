"""Random requests, and whether an engine answers them as a plain version of its cache method does."""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tests.oracles.unmasking import Decoding
from tests.support.engines import assert_nothing_left, generate

if TYPE_CHECKING:
    from dllm_engine import LLM

Request = tuple[list[int], dict[str, Any]]
"""A prompt and what is asked of it: fields that ``DiffusionParams`` and the plain versions share."""
COIN_TOSS = 1e-4
"""Decisions closer than this may go the other way by rounding."""


def random_requests(seed: int, count: int, is_dream: bool) -> list[Request]:
    """Lengths that fit nothing, blocks unlike in length, fewer steps than tokens, and every parallel rule."""
    draw = random.Random(seed)
    return [_random_request(draw, is_dream) for _ in range(count)]


def _random_request(draw: random.Random, is_dream: bool) -> Request:
    prompt = [draw.randrange(480) for _ in range(draw.choice([1, 2, draw.randrange(3, 20), draw.randrange(20, 60)]))]
    gen_length = draw.randrange(1, 25)
    block_length = min(draw.choice([1, 3, 5, 8, 16, gen_length]), gen_length)
    num_blocks = -(-gen_length // block_length)
    asked: dict[str, Any] = {"gen_length": gen_length, "block_length": block_length}
    by_probability = "maskgit_plus" if is_dream else "low_confidence"
    rule = draw.choice([None, None, None, "threshold", "factor", "entropy_bound", "margin"])
    if rule is None:
        asked["steps"] = draw.choice([gen_length, draw.randrange(num_blocks, gen_length + 1)])
        asked["unmasking"] = draw.choice([by_probability, "entropy", "topk_margin"])
    else:
        values = {"threshold": (0.2, 0.5, 0.9), "factor": (1.0, 3.0), "entropy_bound": (0.3, 3.0), "margin": (0.1, 0.6)}
        asked[rule] = draw.choice(values[rule])
        asked["unmasking"] = {"entropy_bound": "entropy", "margin": "topk_margin"}.get(rule, by_probability)
    if is_dream and draw.random() < 0.3:
        asked |= {"top_p": 0.9, "top_k": 20}
    return prompt, asked


def assert_answers_as(
    llm: "LLM", requests: Sequence[Request], plain: Callable[[list[int], dict[str, Any]], Any]
) -> int:
    """Ask for all requests together and for some alone. ``plain`` decodes one; returns how many were no coin toss."""
    from dllm_engine import DiffusionParams

    params = [DiffusionParams(**asked, ignore_eos=True) for _, asked in requests]
    answers = [output.outputs[0] for output in generate(llm, [prompt for prompt, _ in requests], params)]
    assert_nothing_left(llm)
    compared = 0
    for number, ((prompt, asked), answer) in enumerate(zip(requests, answers, strict=True)):
        run: Decoding = plain(prompt, asked)
        if run.closest <= COIN_TOSS:
            continue
        compared += 1
        same = [answer]
        if number % 3 == 0:
            same.append(generate(llm, [prompt], params[number])[0].outputs[0])
        for one in same:
            figures = one.diffusion
            whole = list(range(run.length))
            computed = [whole if rows is None else rows for rows in figures.computed_positions]
            assert list(one.token_ids) == run.tokens, (prompt, asked)
            assert figures.unmasked_per_step == run.order, (prompt, asked)
            assert computed == run.computed, (prompt, asked)
            for name, expected in run.traces.items():
                assert getattr(figures, name) == expected, (name, prompt, asked)
    return compared
