"""The error of a request that cannot be served."""

from vllm.exceptions import VLLMValidationError


class InvalidRequestError(VLLMValidationError, ValueError):
    """A request that cannot be served as asked. vLLM's server answers it with 400."""
