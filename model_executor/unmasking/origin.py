"""Dream's ``origin``: each position is unmasked by chance, with the share of the time grid as probability."""

from dllm_engine.model_executor.unmasking.policy import UnmaskingPolicy, required

ORIGIN = UnmaskingPolicy(
    "origin",
    confidence=lambda statistics: required(statistics.noise),
    tempered=True,
    needs_noise=True,
    draws_each_position=True,
)
