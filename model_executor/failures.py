"""Errors in the work of one request."""

import torch

from dllm_engine.decoding import messages
from dllm_engine.decoding.messages import RequestFailure

_OF_THE_DEVICE = (
    torch.OutOfMemoryError,
    torch.AcceleratorError,
    torch.distributed.DistError,
)
"""Errors of a device or another rank. They are not the fault of the request that was
running, and only one rank may have them, so the process ends."""


def failure_of(request_id: str, error: Exception) -> RequestFailure:
    """Failure of a request's work on a device, by ``messages.failure_of``."""
    if isinstance(error, _OF_THE_DEVICE):
        raise error
    return messages.failure_of(request_id, error)
