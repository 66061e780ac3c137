"""Dream's ``topk_margin``: the distance between the two likeliest tokens."""

from dllm_engine.model_executor.unmasking.policy import UnmaskingPolicy, required

TOPK_MARGIN = UnmaskingPolicy(
    "topk_margin",
    confidence=lambda statistics: required(statistics.margin),
    tempered=True,
    measures="margin",
    needs_margin=True,
)
