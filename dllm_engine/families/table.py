"""The table of model families."""

from dllm_engine.families.block_attention import (
    DREAM_REASONER,
    FAST_DLLM_V2,
    LLADA2,
    NEMOTRON_LABS,
    SDAR,
    SDAR_MOE,
    STABLE_DIFFCODER,
)
from dllm_engine.families.family import ModelFamily
from dllm_engine.families.full_attention import (
    A2D_QWEN2,
    A2D_QWEN3,
    DREAM,
    ILLADA,
    LLADA,
    LLADA_MOE,
    OPEN_DCODER,
)

FAMILIES: dict[str, ModelFamily] = {
    family.architecture: family
    for family in (
        LLADA,
        LLADA_MOE,
        ILLADA,
        DREAM,
        SDAR,
        SDAR_MOE,
        DREAM_REASONER,
        STABLE_DIFFCODER,
        LLADA2,
        A2D_QWEN3,
        A2D_QWEN2,
        OPEN_DCODER,
        FAST_DLLM_V2,
        NEMOTRON_LABS,
    )
}


NOT_SUPPORTED = {
    "wedlm": (
        "WeDLM attends in the order in which tokens are decided, not in that of their "
        "positions"
    ),
    "modernbert": "ModernBERT has other layers: LayerNorm, and local attention",
    "nemotron_labs_diffusion_vlm": "Nemotron-Labs-Diffusion-VLM reads pictures",
}
"""Diffusion models that are not served, by a part of ``model_type``, and the reason."""
