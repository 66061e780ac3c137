"""Context in which a request's options are resolved, and the error for refusals."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dllm_engine.families import ModelFamily
from dllm_engine.options import EngineOptions

if TYPE_CHECKING:  # commands declare request options without importing vLLM
    from vllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class RequestContext:
    """A request's parameters, with its model and engine.

    Groups of options are resolved from two objects: ``own`` has the options that the
    request sets, and ``options`` has them with the defaults of engine and checkpoint
    filled in."""

    params: "SamplingParams"
    prompt_length: int
    hf_config: Any
    """The model's config."""
    family: ModelFamily
    """The model family, with the decoding conventions of the cache method."""
    engine: EngineOptions


def refused(reason: str) -> ValueError:
    """Make an ``InvalidRequestError``, or in a command that plans without vLLM (whose
    import takes seconds) a ``ValueError``.
    """
    if "vllm" not in sys.modules:
        return ValueError(reason)
    from dllm_engine.request_options.errors import InvalidRequestError

    return InvalidRequestError(reason)
