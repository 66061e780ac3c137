"""The options of a request in vLLM's sampling parameters, and the error of one that cannot be served."""

from typing import Any

from pydantic import ValidationError
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from dllm_engine.options import explain
from dllm_engine.scheduler.options.request_fields import RequestOptions

DEFAULT_GEN_LENGTH = 256
"""Response tokens of a request that names no length, unless the checkpoint says otherwise."""

CONSTRAINT = "constraint"
"""Where the automaton of ``structured_outputs`` travels in a request's ``extra_args``."""

_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""Fields of requests that vLLM's server puts into ``extra_args``, also where they are empty."""


class InvalidRequestError(VLLMValidationError, ValueError):
    """A request that cannot be served as asked. vLLM's server answers it with 400."""


def request_options(params: SamplingParams) -> RequestOptions:
    """The options in a request's ``extra_args``; raises ``InvalidRequestError`` naming what is wrong with which."""
    given = params.extra_args or {}
    carried = {CONSTRAINT} if constraint_in(params) is not None else set()
    carried |= {name for name in _TRANSFERS if given.get(name) == {}}
    return parse_request_options({name: x for name, x in given.items() if name not in carried})


def constraint_in(params: SamplingParams) -> bytes | None:
    """What a request's text must match, as ``Automaton.packed``; None: anything. Clients cannot send bytes."""
    given = (params.extra_args or {}).get(CONSTRAINT)
    return given if isinstance(given, bytes) else None


def parse_request_options(raw: dict[str, Any]) -> RequestOptions:
    """Validate request options; raises ``InvalidRequestError`` naming what is wrong with which."""
    try:
        return RequestOptions.model_validate(raw)
    except ValidationError as error:
        raise InvalidRequestError(explain(error, "request option", RequestOptions.model_fields)) from None
