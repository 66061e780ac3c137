"""LLaDA's remasking by low confidence: keep masked what the model is least sure of."""

from dllm_engine.model_executor.unmasking.policy import UnmaskingPolicy

LOW_CONFIDENCE = UnmaskingPolicy(
    "low_confidence", confidence=lambda statistics: statistics.probability, measures="probability"
)
