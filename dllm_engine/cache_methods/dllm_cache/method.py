"""dLLM-Cache (arXiv 2506.06295): prompt and response are refreshed at separate
intervals, and between refreshes the response rows that have changed most are
recomputed.
"""

from typing import ClassVar

from dllm_engine.cache_methods.adaptive import (
    AdaptiveOptions,
    feature_pages,
    plan_adaptive,
)
from dllm_engine.cache_methods.base import CacheMethod
from dllm_engine.decoding.canvas_layout import Blocks
from dllm_engine.decoding.page_layout import PageCounts, PageKind, PoolGeometry
from dllm_engine.decoding.spec import DecodingSpec, PaperSettings, TunedValues

_INTERVALS = {
    "LLaDA": {"1.5": (100, 6), "base": (25, 5), "instruct": (50, 7)},
    "Dream": {"base": (100, 2), "instruct": (50, 2)},
}
"""Intervals (prompt, response) by a word of the model's name. The paper has intervals
for each benchmark (Tables 11 to 14), which ``dllm eval --paper-task`` uses. These
general ones are from Sparse-dLLM's comparison with dLLM-Cache (its Appendix B). It
leaves out LLaDA-8B-Base, which gets the intervals for GSM8K (Table 11), as
LLaDA-8B-Instruct's 50 and 7 are (Table 12)."""


class DLLMCacheOptions(AdaptiveOptions):
    """Options of ``dllm_cache`` (dLLM-Cache, arXiv 2506.06295)."""

    paper_settings: ClassVar[PaperSettings] = {
        family: {
            part: {
                "prompt_refresh_interval": prompt,
                "response_refresh_interval": response,
            }
            for part, (prompt, response) in intervals.items()
        }
        for family, intervals in _INTERVALS.items()
    }
    tuned: ClassVar[TunedValues] = {
        "response_refresh_interval": (4, 7, 14),
        "update_ratio": (0.1, 0.25, 0.5),
    }


def hold_canvas_and_features(
    spec: DecodingSpec, running: Blocks, geometry: PoolGeometry
) -> PageCounts:
    return geometry.uniform(spec.layout.canvas_length) | {
        PageKind.FEATURES: feature_pages(spec, geometry)
    }


DLLM_CACHE = CacheMethod(
    plan_adaptive,
    hold_canvas_and_features,
    DLLMCacheOptions,
    "dllm_engine.cache_methods.adaptive_pass:AdaptivePass",
)
