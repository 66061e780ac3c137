"""A request on its way into a ``DecodingSpec``, and the error that ends it there."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dllm_engine.families import ModelFamily
from dllm_engine.options import EngineOptions

if TYPE_CHECKING:  # commands declare request options without importing vLLM
    from vllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class RequestContext:
    """A request's parameters, and the model and engine that it is for.

    Groups of options are resolved from two objects: ``own`` has what the request itself
    names, ``options`` has that with the defaults of engine and checkpoint."""

    params: "SamplingParams"
    prompt_length: int
    hf_config: Any
    """The model's config, with its tokens."""
    family: ModelFamily
    """With the decoding conventions of the cache method."""
    engine: EngineOptions


def refused(reason: str) -> ValueError:
    """Make an ``InvalidRequestError``, or a ``ValueError`` in a command that plans
    without vLLM, whose import takes seconds.
    """
    if "vllm" not in sys.modules:
        return ValueError(reason)
    from dllm_engine.request_options.errors import InvalidRequestError

    return InvalidRequestError(reason)
