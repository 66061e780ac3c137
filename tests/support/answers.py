"""An engine's answer to a request, in the form in which the plain
versions give theirs.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.outputs import RequestOutput

from dllm_engine import LLM, DiffusionParams
from tests.support.engines import assert_nothing_left, generate, runner_of
from tests.support.stepped_engines import Poison, run_in_steps

Request = tuple[list[int], dict[str, Any]]
"""A prompt and what is asked of it: fields of ``DiffusionParams``."""


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    order: list[list[int]]
    """Canvas positions unmasked per forward pass."""
    computed: list[list[int]]
    """Canvas positions fed per forward pass."""
    traces: dict[str, list]
    """What else was traced."""
    tokens_computed: int
    """Rows computed, as the figures say; fewer than were fed where layers leave some
    out.
    """


def answer_of(
    output: RequestOutput,
    gen_length: int | None = None,
    num_given: int = 0,
    whole_text: bool = False,
) -> Answer:
    """Its figures agree with its trace. ``gen_length``: of a response that an end token
    may have ended. ``num_given``: its tokens that a template gave. ``whole_text``:
    whether a constraint asks for one."""
    (completion,) = output.outputs
    figures = completion.diffusion
    tokens = list(completion.token_ids)
    whole = list(range(len(output.prompt_token_ids) + (gen_length or len(tokens))))
    computed = [whole if rows is None else rows for rows in figures.computed_positions]
    order = figures.unmasked_per_step
    assert (
        completion.finish_reason == ("stop" if whole_text else "length")
        or gen_length is not None
    )
    assert (
        figures.denoising_steps == figures.forward_passes == len(order) == len(computed)
    )
    num_taken_back = sum(map(len, figures.trace.get("remasked_per_step", [])))
    num_unmasked = sum(map(len, order)) - num_taken_back
    assert figures.tokens_unmasked == num_unmasked >= len(tokens) - num_given
    return Answer(tokens, order, computed, figures.trace, figures.tokens_computed)


def params_of(asked: dict[str, Any]) -> DiffusionParams:
    fields = {"ignore_eos": True} | asked
    constraint = fields.pop("constraint", None)
    return DiffusionParams(
        **fields, extra_args=None if constraint is None else {"constraint": constraint}
    )


def answers(
    llm: LLM, requests: Sequence[Request], draw: random.Random | None = None
) -> list[Answer]:
    """Of requests that leave nothing behind, nor find anything that others have left.
    ``draw``: they join at random steps, and page memory holds NaN wherever nothing has
    been written for a request; otherwise they run together."""
    llm.reset_prefix_cache()
    prompts = [prompt for prompt, _ in requests]
    params = [params_of(asked) for _, asked in requests]
    if draw is None:
        outputs = generate(llm, prompts, params)
        assert_nothing_left(llm)
    else:
        joins = [0, *(draw.randrange(12) for _ in requests[1:])]
        poison = Poison(llm) if runner_of(llm).rank.pages is not None else lambda: None
        outputs = run_in_steps(
            llm, prompts, params, joins=joins, after_step=poison
        ).outputs
    return [
        answer_of(
            output,
            asked["gen_length"] if asked.get("stop_token_ids") else None,
            sum(token is not None for token in asked.get("response_template", ())),
            "constraint" in asked,
        )
        for output, (_, asked) in zip(outputs, requests, strict=True)
    ]
