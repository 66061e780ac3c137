"""Tokens and request defaults from the config of a checkpoint."""

from collections.abc import Mapping
from typing import Any

from dllm_engine.model_name import own_name


def released_defaults(hf_config: Any) -> Mapping[str, Any]:
    """Request defaults of a released checkpoint, which its own name identifies."""
    name = own_name(str(getattr(hf_config, "name_or_path", "")))
    by_name = {
        own_name(released): defaults
        for released, defaults in hf_config.family.released_defaults.items()
    }
    return by_name.get(name, {})


def barred_tokens(hf_config: Any) -> list[int]:
    """Tokens that are never chosen."""
    barred = hf_config.family.barred
    keys = () if barred is None else barred.keys
    return [token for key in keys for token in _config_tokens(hf_config, key)]


def model_end_tokens(hf_config: object) -> list[int]:
    """The end tokens that a checkpoint's config names."""
    return _config_tokens(hf_config, "eos_token_id")


def every_end_token(hf_config: object) -> list[int]:
    """The end tokens that a checkpoint's config names, and the token that ends a turn
    of a chat.
    """
    return [
        *model_end_tokens(hf_config),
        *_config_tokens(hf_config, "end_of_turn_token_id"),
    ]


def _config_tokens(hf_config: object, key: str) -> list[int]:
    value = getattr(hf_config, key, None)
    return value if isinstance(value, list) else [] if value is None else [value]
