"""Decisions of fields over HTTP: ``/v1/decisions``, and OpenAI's ``response_format``
with ``logprobs``, which is a decision if its JSON schema has fields that a decision can
have."""

import time
from typing import Any

from fastapi import Request
from pydantic import Field
from starlette.responses import JSONResponse
from vllm.utils import random_uuid

from dllm_engine.constraints.decision import unpacked_decision
from dllm_engine.decisions.fields import read_fields
from dllm_engine.decisions.requests import (
    TOP_K,
    DecisionOutput,
    decision_params_when_built,
)
from dllm_engine.decoding.option_types import MOST_TOKENS
from dllm_engine.infill.http import length_of, set_length
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.sampling_params import DECISION
from dllm_engine.structured_output.requests import reading
from dllm_engine.vllm_hooks.server.prompts import PromptRequest, prompt_tokens

MOST_VALUES = 100
_GENERATES = "temperature min_tokens logit_bias ignore_eos stop_token_ids structured_outputs tools stream".split()
"""Fields of a request that only generation supports, or that a decision refuses."""


class DecisionRequest(PromptRequest):
    """The body of a request: a prompt or messages, and the fields to decide."""

    fields: dict[str, Any]
    """JSON schema of an object."""
    template: str | None = None
    passes: int = Field(1, ge=1, le=MOST_TOKENS)
    top_k: int = Field(TOP_K, ge=1, le=MOST_VALUES)
    priority: int = 0
    stream: bool = False


async def create_decision(
    request: DecisionRequest, raw_request: Request
) -> JSONResponse:
    """Answer a body with ``fields``."""
    state = raw_request.app.state
    if request.stream:
        raise InvalidRequestError(
            "stream: all fields of a decision come at once; leave it unset"
        )
    engine = state.engine_client
    tokenizer = state.openai_serving_completion.renderer.tokenizer
    prompt = await prompt_tokens(request, state)
    settings = request.model_dump(include={"template", "passes", "top_k"})
    params = await decision_params_when_built(
        request.fields, tokenizer, engine.vllm_config, **settings
    )
    request_id = f"decision-{random_uuid()}"
    results = engine.generate(
        {"prompt_token_ids": prompt}, params, request_id, priority=request.priority
    )
    (output,) = [result async for result in results]
    decision = DecisionOutput.of(output)
    num_prompt = len(prompt)
    num_tokens = len(output.outputs[0].token_ids)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
    }
    figures = decision.figures.to_json()
    fields = figures.pop("decision")
    figures.pop("trace", None)  # A body cannot ask for it.
    body = {
        "id": request_id,
        "object": "decision",
        "created": int(time.time()),
        "model": request.model or state.openai_serving_models.model_name(),
        "values": decision.values,
        "fields": fields,
        "text": decision.text,
        "usage": usage,
        "diffusion": figures,
    }
    return JSONResponse(body)


async def settle_decision(request: Any, serving: Any) -> None:
    """Turn a greedy request for log-probabilities of a JSON text into a decision, if it
    asks for nothing else.

    All properties must be required. Other requests generate their text, and so do
    requests whose ``max_tokens`` is less than the longest text. ``serving``: the object
    of vLLM's server that answers the request.
    """
    wanted: Any = getattr(request, "response_format", None)
    if getattr(wanted, "type", None) != "json_schema" or wanted.json_schema is None:
        return
    schema = wanted.json_schema.json_schema
    vllm_config = serving.engine_client.vllm_config
    if schema is None or request.logprobs is None or request.logprobs is False:
        return
    xargs = dict(request.vllm_xargs or {})
    defaults = serving.default_sampling_params
    asked = defaults | {name: value for name, value in request if value is not None}
    is_sampled = (
        asked.get("top_p", 1) != 1
        or asked.get("top_k", 0) > 0
        or asked.get("n", 1) != 1
    )
    if (
        is_sampled
        or any(asked.get(name) for name in _GENERATES)
        or xargs.keys() - {"passes", "trace"}
    ):
        return
    if vllm_config.structured_outputs_config.reasoning_parser:
        return
    try:
        names = {field.name for field in await reading(read_fields, schema)}
        if names != {*schema.get("required", ())}:
            return
        params = await decision_params_when_built(
            schema, serving.renderer.tokenizer, vllm_config
        )
    except ValueError:
        return
    bound = length_of(request) or defaults.get("max_tokens", params.max_tokens)
    if (
        bound < params.max_tokens
        or None not in unpacked_decision(params.extra_args[DECISION]).template
    ):
        return
    request.vllm_xargs = {**params.extra_args, **xargs}
    request.response_format, request.temperature = None, 0.0
    set_length(request, params.max_tokens)
