"""Dream's ``maskgit_plus``: the probability of the predicted token."""

from dllm_engine.model_executor.unmasking.policy import UnmaskingPolicy

MASKGIT_PLUS = UnmaskingPolicy(
    "maskgit_plus", confidence=lambda statistics: statistics.probability, tempered=True, measures="probability"
)
