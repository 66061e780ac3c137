"""Unmasking: which masked positions a step fills (policies), and how many where no fixed count is asked for (rules).

A new policy or rule of parallel unmasking is one file here and its entry below.
"""

from dllm_engine.model_executor.unmasking.entropy import ENTROPY
from dllm_engine.model_executor.unmasking.entropy_bound import ENTROPY_BOUND
from dllm_engine.model_executor.unmasking.factor import FACTOR
from dllm_engine.model_executor.unmasking.low_confidence import LOW_CONFIDENCE
from dllm_engine.model_executor.unmasking.margin import MARGIN
from dllm_engine.model_executor.unmasking.maskgit_plus import MASKGIT_PLUS
from dllm_engine.model_executor.unmasking.origin import ORIGIN
from dllm_engine.model_executor.unmasking.parallel import ParallelUnmasking
from dllm_engine.model_executor.unmasking.policy import UnmaskingPolicy
from dllm_engine.model_executor.unmasking.random import RANDOM
from dllm_engine.model_executor.unmasking.threshold import EXCEEDED_THRESHOLD, THRESHOLD
from dllm_engine.model_executor.unmasking.topk_margin import TOPK_MARGIN

UNMASKING_POLICIES: dict[str, UnmaskingPolicy] = {
    policy.name: policy for policy in (LOW_CONFIDENCE, RANDOM, MASKGIT_PLUS, ENTROPY, TOPK_MARGIN, ORIGIN)
}
PARALLEL_RULES: dict[str, ParallelUnmasking] = {
    rule.name: rule for rule in (THRESHOLD, EXCEEDED_THRESHOLD, FACTOR, ENTROPY_BOUND, MARGIN)
}
