"""The route ``/v1/likelihoods``: log-likelihoods of given answers.

OpenAI's ``echo`` with ``logprobs`` asks for the probability of each token after the
tokens before it, which a masked model does not have. The model's bound depends on where
the answer begins.
"""

import itertools
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import Request
from pydantic import Field
from starlette.responses import JSONResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation

from dllm_engine.admission import check_tokens
from dllm_engine.evaluation.likelihood import (
    NUM_SAMPLES,
    Canvas,
    no_likelihoods,
    probe_of,
    weighted_canvases,
)
from dllm_engine.lengths.forward_passes import served_answers
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.vllm_hooks.server.prompts import (
    PromptRequest,
    Tokens,
    prompt_tokens,
    rendered_tokens,
)

ROUTE = "/v1/likelihoods"
MOST_SAMPLES, MOST_ANSWERS = 1024, 256
MOST_FULL_CANVASES = 256
"""Limit on the rows of forward passes for a request, in canvases of ``max_model_len``.
"""


class LikelihoodRequest(PromptRequest):
    """The body of a request: a prompt or messages, and possible answers as texts or
    token ids.
    """

    answers: list[str] | list[Tokens] = Field(min_length=1, max_length=MOST_ANSWERS)
    num_samples: int = Field(NUM_SAMPLES, ge=1, le=MOST_SAMPLES)
    seed: int = Field(0, ge=0, lt=1 << 63)
    masks: list[Tokens] | None = None


def add_route(app: Any) -> None:
    """Serve ``/v1/likelihoods`` from a FastAPI ``app`` of vLLM's."""

    async def create_likelihoods(
        request: LikelihoodRequest, raw_request: Request
    ) -> JSONResponse:
        state = raw_request.app.state
        prompt = await prompt_tokens(request, state)
        asked = CompletionRequest(
            model=request.model,
            prompt=request.answers,
            add_special_tokens=False,
            max_tokens=1,
        )
        answers = await rendered_tokens(
            state.openai_serving_completion.render_completion_request(asked)
        )
        _check(request, prompt, answers, state.engine_client.model_config)
        data = await _computed(state.engine_client, request, prompt, answers)
        num_tokens = len(prompt) + sum(map(len, answers))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        model = request.model or state.openai_serving_models.model_name()
        return JSONResponse(
            {"object": "list", "model": model, "data": data, "usage": usage}
        )

    app.add_api_route(
        ROUTE, with_cancellation(load_aware_call(create_likelihoods)), methods=["POST"]
    )


def _check(
    request: LikelihoodRequest,
    prompt: list[int],
    answers: list[list[int]],
    model_config: Any,
) -> None:
    """Raise ``InvalidRequestError`` for a request that cannot be computed."""
    if reason := no_likelihoods(model_config.hf_config.family):
        raise InvalidRequestError(reason)
    limit = model_config.max_model_len
    check_tokens(prompt, model_config.hf_config)
    num_rows = 0
    for index, answer in enumerate(answers):
        check_tokens(answer, model_config.hf_config, f"answers[{index}]")
        length = len(prompt) + len(answer)
        if length > limit:
            raise InvalidRequestError(
                f"answers[{index}]: prompt ({len(prompt)} tokens) and answer "
                f"({len(answer)}) need a canvas of {length}, max_model_len is {limit}; "
                f"shorten one or raise max_model_len"
            )
        num_masks = (
            min(2 ** len(answer) - 1, request.num_samples)
            if request.masks is None
            else len(request.masks)
        )
        num_rows += num_masks * length
    shortest = min(map(len, answers))
    for number, mask in enumerate(request.masks or ()):
        if max(mask, default=0) >= shortest or len(set(mask)) < len(mask):
            raise InvalidRequestError(
                f"masks[{number}] must hold different positions in an answer, and the "
                f"shortest has {shortest} tokens"
            )
    if num_rows > MOST_FULL_CANVASES * limit:
        asked = (
            f"num_samples={request.num_samples}"
            if request.masks is None
            else f"{len(request.masks)} masks"
        )
        raise InvalidRequestError(
            f"{asked}: forward passes over {num_rows} rows in all, a request may take "
            f"{MOST_FULL_CANVASES * limit}; ask for less, or for fewer answers at once"
        )


async def _computed(
    engine: Any,
    request: LikelihoodRequest,
    prompt: list[int],
    answers: list[list[int]],
) -> list[dict[str, Any]]:
    """Log-likelihood of each answer, or the log-probabilities of each mask's tokens."""
    data: list[dict[str, Any]] = [
        {"index": i, "num_tokens": len(answer)} for i, answer in enumerate(answers)
    ]
    if request.masks is None:
        pairs = [(prompt, answer) for answer in answers]
        terms, ahead = itertools.tee(
            weighted_canvases(pairs, request.num_samples, request.seed)
        )
        async for logprobs in _logprobs(engine, (canvas for _, _, canvas in ahead)):
            index, weight, _ = next(terms)
            data[index]["log_likelihood"] = data[index].get(
                "log_likelihood", 0.0
            ) + weight * sum(logprobs)
        return data
    masks = [[len(prompt) + position for position in mask] for mask in request.masks]
    canvases = ((prompt + answer, mask) for answer in answers for mask in masks)
    computed = [logprobs async for logprobs in _logprobs(engine, canvases)]
    for entry in data:
        entry["logprobs"], computed = computed[: len(masks)], computed[len(masks) :]
    return data


async def _logprobs(
    engine: Any, canvases: Iterable[Canvas]
) -> AsyncIterator[list[float]]:
    """Log-probabilities of each canvas's masked tokens."""
    async for answer in served_answers(engine, map(probe_of, canvases)):
        yield answer.tokens
