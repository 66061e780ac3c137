"""OpenAI's ``response_format`` with ``logprobs``: a decision, where its JSON schema has the fields of one."""

from typing import Any

from dllm_engine.decisions.fields import read_fields
from dllm_engine.decisions.requests import decision_params_when_built
from dllm_engine.infill.http import length_of, set_length
from dllm_engine.scheduler.options.request_options import InvalidRequestError


async def settle_decision(request: Any, serving: Any) -> None:
    """Turn a greedy request for log-probabilities of a JSON text into a decision, if it asks for nothing else.

    All properties must be required. Other requests generate their text, and so do those whose ``max_tokens`` is less
    than the longest text.

    Args:
        request: a request object of vLLM's server, which is changed.
        serving: the server's object that has it.
    """
    wanted: Any = getattr(request, "response_format", None)
    if getattr(wanted, "type", None) != "json_schema" or wanted.json_schema is None:
        return
    schema = wanted.json_schema.json_schema
    if schema is None or request.logprobs in (None, False):
        return
    xargs, engine = dict(request.vllm_xargs or {}), serving.engine_client
    is_plain = not (xargs.keys() - {"passes", "trace"} or getattr(request, "tools", None) or request.stream)
    is_greedy = not request.temperature and request.n in (None, 1)
    reasons = engine.vllm_config.structured_outputs_config.reasoning_parser
    if reasons or not (is_plain and is_greedy):
        return
    try:
        names = {field.name for field in read_fields(schema)}
    except InvalidRequestError:
        return
    if names != {*schema.get("required", ())}:
        return
    params = await decision_params_when_built(schema, serving.renderer.tokenizer, engine.vllm_config)
    if (bound := length_of(request)) is not None and bound < params.max_tokens:
        return
    request.vllm_xargs = {**params.extra_args, **xargs}
    request.response_format, request.temperature = None, 0.0
    set_length(request, params.max_tokens)
