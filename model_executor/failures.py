"""Errors in the work of one request."""

import torch

from dllm_engine.decoding import messages
from dllm_engine.decoding.messages import RequestFailure

_OF_THE_DEVICE = (
    torch.OutOfMemoryError,
    torch.AcceleratorError,
    torch.distributed.DistError,
)
"""Errors of a device or another rank. They say nothing about the request whose work met
them, and one rank may meet them alone, so the process ends."""


def failure_of(request_id: str, error: Exception) -> RequestFailure:
    """Failure of a request's work on a device, as ``messages.failure_of`` makes it."""
    if isinstance(error, _OF_THE_DEVICE):
        raise error
    return messages.failure_of(request_id, error)
