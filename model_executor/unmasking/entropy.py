"""Dream's ``entropy``: the positions whose distribution has the least entropy."""

from dllm_engine.model_executor.unmasking.policy import UnmaskingPolicy, required

ENTROPY = UnmaskingPolicy(
    "entropy",
    confidence=lambda statistics: required(statistics.negative_entropy),
    tempered=True,
    measures="entropy",
    needs_entropy=True,
)
