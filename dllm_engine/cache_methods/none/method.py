"""No cache: every step computes the whole canvas."""

from dllm_engine.cache_methods.base import CacheMethod, UniformSampler, plan_whole

# ES-dLLM's authors compare their cache with the same sampler without one; `delay_eos`
# asks for that.
NONE = CacheMethod(
    plan_whole,
    attention=("full", "block_causal", "causal"),
    layer_pass="dllm_engine.model_executor.passes.paged:WholePass",
    trims_suffix=True,
    shares_prompts=True,
    sampler=UniformSampler(only_with_delay_eos=True),
)
