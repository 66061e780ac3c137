"""Filling in over HTTP: OpenAI's ``suffix`` of completions, and templates in
``vllm_xargs``.
"""

import json
from typing import Any

from vllm.utils.async_utils import make_async

from dllm_engine.infill.template import check_length, filled_in, response_template
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.fields import RequestOptions
from dllm_engine.request_options.sampling_params import parse_request_options

_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Names of the length in the request classes; the first that is set counts."""


async def settle_template(request: Any, serving: Any) -> None:
    """Turn ``suffix``, or ``template`` in ``vllm_xargs``, of a request object of vLLM's
    server into ``response_template``, and set the length of a request that has one: a
    longer one is an upper bound."""
    xargs = dict(getattr(request, "vllm_xargs", None) or {})
    template, suffix = xargs.pop("template", None), getattr(request, "suffix", None)
    if suffix is not None:
        template = _around_suffix(request, suffix, xargs, template)
        xargs["return_given"] = False
    if template is not None:
        if "response_template" in xargs:
            raise InvalidRequestError(
                "template and response_template are one thing in two forms; give one"
            )
        if not isinstance(template, list):
            raise InvalidRequestError(
                f"template is a {type(template).__name__}, not a list of texts and of "
                f"holes' numbers of tokens"
            )
        tokenize = make_async(
            response_template, serving.renderer._executor
        )  # in vLLM's own threads for that
        tokens = await tokenize(
            template, serving.renderer.tokenizer, serving.model_config.max_model_len
        )
        xargs["response_template"] = json.dumps(
            tokens
        )  # vLLM reads a batch of chats anew, and takes no null
        request.vllm_xargs = xargs
    else:
        check_length(
            "response_template",
            xargs.get("response_template"),
            serving.model_config.max_model_len,
        )
    if length := _options(xargs).returned_length:
        bound = length_of(request)
        set_length(request, length if bound is None else min(bound, length))


def template_fields(
    completion: Any, options: dict[str, Any], tokenizer: Any
) -> dict[str, Any]:
    """The field ``holes`` of a choice: the text of each hole. ``options``: of its
    request.
    """
    given = _options(options)
    template = given.response_template
    if template is None or tokenizer is None:
        return {}
    return {
        "holes": filled_in(
            completion.token_ids,
            template,
            tokenizer,
            with_given=given.return_given is not False,
        )
    }


def set_length(request: Any, length: int) -> None:
    """Set the most tokens of a request's response."""
    setattr(
        request,
        next(name for name in _LENGTHS if name in type(request).model_fields),
        length,
    )


def length_of(request: Any) -> int | None:
    """The length that the request names."""
    given = vars(request)  # reading one of them as an attribute is a warning
    return next((given[name] for name in _LENGTHS if given.get(name) is not None), None)


def _around_suffix(
    request: Any, suffix: str, xargs: dict[str, Any], template: Any
) -> list[str | int]:
    if template is not None or "response_template" in xargs:
        raise InvalidRequestError(
            "suffix and a template both say what is given; give one"
        )
    if getattr(request, "echo", False):
        raise InvalidRequestError(
            "suffix is not supported with echo; leave one of them unset"
        )
    length = length_of(request)
    if length is not None and length < 1:
        raise InvalidRequestError(
            f"max_tokens={length}: with suffix, at least 1 token is filled in"
        )
    if not isinstance(suffix, str):
        raise InvalidRequestError(f"suffix is a {type(suffix).__name__}, not a text")
    # vLLM would render it as a prompt of a model that was trained to continue prompts.
    request.suffix = None
    return [16 if length is None else length, suffix]  # by OpenAI's documentation


def _options(xargs: dict[str, Any]) -> RequestOptions:
    return parse_request_options(
        {name: xargs.get(name) for name in ("response_template", "return_given")}
    )
