"""Request options in vLLM's sampling parameters."""

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from dllm_engine.request_options.context import refused
from dllm_engine.request_options.fields import RequestOptions
from dllm_engine.text import explain

if TYPE_CHECKING:  # commands read requests without importing vLLM
    from vllm.sampling_params import SamplingParams

DEFAULT_GEN_LENGTH = 256
"""Response tokens of a request that names no length, unless the checkpoint says
otherwise.
"""


class DefaultLength(int):
    """Length of a response whose request names none, because vLLM needs a number. It
    may be replaced by a larger one.
    """


class ResponseLimit(int):
    """Limit on the response tokens of a server's requests, which its operator has set."""


CONSTRAINT = "constraint"
REASONING = "reasoning"
DECISION = "decision"
SOURCE = "source"
LENGTH_FIGURES = "length_figures"
HOLE_EDGES = "hole_edges"
_CARRIED = (CONSTRAINT, REASONING, DECISION, SOURCE, LENGTH_FIGURES, HOLE_EDGES)
"""Keys of a request's ``extra_args``: for the automaton of ``structured_outputs``, the
automaton of the reasoning before it, the fields of a decision, the id of its HTTP
request, the figures of the choice of its length, and the edges of its hole. Their
values are bytes, which clients cannot send."""

_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""Fields of requests that vLLM's server puts into ``extra_args``, even if they are
empty.
"""


def request_options(params: "SamplingParams") -> RequestOptions:
    """The options in a request's ``extra_args``. Raises ``InvalidRequestError`` naming
    wrong options and the reason.
    """
    extra_args = params.extra_args or {}
    carried = {name for name in _CARRIED if bytes_in(params, name) is not None}
    carried |= {name for name in _TRANSFERS if extra_args.get(name) == {}}
    return parse_request_options(
        {name: x for name, x in extra_args.items() if name not in carried}
    )


def bytes_in(params: "SamplingParams", name: str) -> bytes | None:
    """Bytes of a request under ``CONSTRAINT`` or another key above; None: there are
    none.
    """
    value = (params.extra_args or {}).get(name)
    return value if isinstance(value, bytes) else None


def parse_request_options(
    raw: dict[str, Any], what: str = "request option"
) -> RequestOptions:
    """Validate request options. Raises ``InvalidRequestError`` naming wrong options and
    the reason. ``what``: as in ``explain``."""
    try:
        return RequestOptions.model_validate(raw)
    except ValidationError as error:
        raise refused(explain(error, what, RequestOptions.model_fields)) from None
