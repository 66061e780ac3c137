"""No cache: every step computes the whole canvas."""

from dllm_engine.cache_methods.base import CacheMethod, plan_whole, with_uniform_sampler
from dllm_engine.families import ModelFamily


def _conventions(family: ModelFamily, delay_eos: bool) -> ModelFamily:
    """With ``delay_eos`` the sampler of ES-dLLM, whose authors compare their cache with
    the same sampler without a cache.
    """
    return with_uniform_sampler(family) if delay_eos else family


NONE = CacheMethod(
    plan_whole,
    attention=("full", "block_causal", "causal"),
    layer_pass="dllm_engine.model_executor.passes.paged:WholePass",
    trims_suffix=True,
    shares_prompts=True,
    conventions=_conventions,
)
