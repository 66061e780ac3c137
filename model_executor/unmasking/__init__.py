"""Unmasking policies: which masked positions a step fills. A new one is one file here and its entry below."""

from dllm_engine.model_executor.unmasking.entropy import ENTROPY
from dllm_engine.model_executor.unmasking.low_confidence import LOW_CONFIDENCE
from dllm_engine.model_executor.unmasking.maskgit_plus import MASKGIT_PLUS
from dllm_engine.model_executor.unmasking.origin import ORIGIN
from dllm_engine.model_executor.unmasking.policy import UnmaskingPolicy
from dllm_engine.model_executor.unmasking.random import RANDOM
from dllm_engine.model_executor.unmasking.topk_margin import TOPK_MARGIN

UNMASKING_POLICIES: dict[str, UnmaskingPolicy] = {
    policy.name: policy for policy in (LOW_CONFIDENCE, RANDOM, MASKGIT_PLUS, ENTROPY, TOPK_MARGIN, ORIGIN)
}
