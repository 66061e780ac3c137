"""Keys of config.json that rows of several families have."""

from typing import Any


def sizes(*values: float, **others: Any) -> dict[str, Any]:
    """Defaults of a dense model: vocabulary, hidden size, width of the MLP, layers, heads,
    positions and RoPE's base."""
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    return (
        dict(
            zip((*names, "max_position_embeddings", "rope_theta"), values, strict=True)
        )
        | others
    )


def off(*keys: str) -> dict[str, tuple[Any, ...]]:
    """Values for keys that must be absent or false."""
    return dict.fromkeys(keys, (None, False))


WINDOW_KEYS = ("sliding_window", "max_window_layers")
"""Keys that count only if ``use_sliding_window`` is true."""
