"""LLaDA's random remasking: positions in random order."""

from dllm_engine.model_executor.unmasking.policy import UnmaskingPolicy, required

RANDOM = UnmaskingPolicy("random", confidence=lambda statistics: required(statistics.noise), needs_noise=True)
