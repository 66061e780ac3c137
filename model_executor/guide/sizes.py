"""Sizes and vocabulary of a guide model, read before it is loaded."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from dllm_engine.model_executor.loading.file_kinds import check_files
from dllm_engine.model_executor.models.causal import check_guide
from dllm_engine.model_executor.models.decoder import DecoderShape
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.page_layout import GuideShape


@lru_cache
def guide_config(guide: str) -> Any:
    """A guide's config; raises ``ValueError`` where it cannot be loaded, or names a model that cannot guide."""
    check_files(guide)
    try:
        config = AutoConfig.from_pretrained(guide)
    except (OSError, ValueError) as error:
        raise ValueError(f"guide_model={guide!r} cannot be loaded: {' '.join(str(error).split())}") from None
    check_guide(config)
    config.include_qkv_bias = config.model_type == "qwen2"  # the key under which a diffusion model's config says so
    return config


def has_same_tokens(guide: str, vocabulary: Mapping[str, int]) -> bool:
    """Return True if token ids mean the same to a guide and a model of this vocabulary, and the guide knows most of
    them."""
    theirs = AutoTokenizer.from_pretrained(guide).get_vocab()
    agrees = all(vocabulary.get(token, number) == number for token, number in theirs.items())
    return agrees and len(vocabulary.keys() & theirs.keys()) >= 0.9 * len(vocabulary)


def with_shape(options: EngineOptions, *, same_tokens: bool) -> EngineOptions:
    """Engine options with the sizes of their guide; raises ``ValueError`` as ``guide_config``."""
    assert options.guide_model is not None
    shape = DecoderShape.of(guide_config(options.guide_model))
    guide_shape = GuideShape(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        same_tokens=same_tokens,
        tokens_per_token=1.0 if same_tokens else options.guide_tokens_per_token,
    )
    return options.model_copy(update={"guide_shape": guide_shape})
