"""Errors that end one request while the others go on."""

from typing import Literal, NamedTuple, get_args

import torch
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")

FailureCause = Literal["not_finite", "no_progress", "exception", "refused"]
FAILURE_CAUSES: tuple[str, ...] = get_args(FailureCause)

_OF_THE_PROCESS = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
"""Errors of memory, a device or another rank. They say nothing about the request whose work met them, and one rank may
meet them alone, so the process ends."""


class RequestFailure(NamedTuple):
    """Why a request ends with an error."""

    cause: FailureCause
    message: str
    """For the client."""


def failure_of(request_id: str, error: Exception) -> RequestFailure:
    """The failure of the request whose work raised ``error``; raises the error again where it is not the request's.

    Tensor-parallel ranks do such work on the same data, so they all meet the error.
    """
    if isinstance(error, _OF_THE_PROCESS):
        raise error
    logger.error("request %s ends with an error, the others go on", request_id, exc_info=error)
    return RequestFailure(
        "exception",
        f"an exception in the engine ended this request: {type(error).__name__}: {error}; the server's log has its "
        "traceback",
    )
