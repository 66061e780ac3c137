"""An engine's answer to a request, in the form in which the plain versions give theirs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.engines import assert_nothing_left, generate

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from dllm_engine import LLM

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
    """Rows computed, as the figures say; fewer than were fed where layers leave some out."""


def answer_of(
    output: "RequestOutput", gen_length: int | None = None, num_given: int = 0, whole_text: bool = False
) -> Answer:
    """Its figures agree with its trace. ``gen_length``: of a response that an end token may have ended. ``num_given``:
    its tokens that a template gave. ``whole_text``: whether a constraint asks for one."""
    (completion,) = output.outputs
    figures, tokens = completion.diffusion, list(completion.token_ids)
    whole = list(range(len(output.prompt_token_ids) + (gen_length or len(tokens))))
    computed = [whole if rows is None else rows for rows in figures.computed_positions]
    order = figures.unmasked_per_step
    assert completion.finish_reason == ("stop" if whole_text else "length") or gen_length is not None
    assert figures.denoising_steps == figures.forward_passes == len(order) == len(computed)
    assert figures.tokens_unmasked == sum(map(len, order)) >= len(tokens) - num_given
    return Answer(tokens, order, computed, figures.trace, figures.tokens_computed)


def answers(llm: "LLM", requests: Sequence[Request]) -> list[Answer]:
    """Of requests that run together and leave nothing behind, nor find anything that others have left."""
    from dllm_engine import DiffusionParams

    llm.reset_prefix_cache()

    params = [
        DiffusionParams(
            **({"ignore_eos": True} | {name: value for name, value in asked.items() if name != "constraint"}),
            extra_args={"constraint": asked["constraint"]} if "constraint" in asked else None,
        )
        for _, asked in requests
    ]
    outputs = generate(llm, [prompt for prompt, _ in requests], params)
    assert_nothing_left(llm)
    return [
        answer_of(
            output,
            asked["gen_length"] if asked.get("stop_token_ids") else None,
            sum(token is not None for token in asked.get("response_template", ())),
            "constraint" in asked,
        )
        for output, (_, asked) in zip(outputs, requests, strict=True)
    ]
