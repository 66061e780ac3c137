"""Engines decode random requests of families that the other tests of methods leave out
as plain versions do, on checkpoints of other sizes, and with the options that only they
have.
"""

import random
from typing import Any

import pytest

from tests.methods.test_random_requests import plain_version
from tests.oracles.models import PlainModel
from tests.support import tiny_checkpoints
from tests.support.answers import Request
from tests.support.random_requests import (
    assert_answers_as,
    between_blocks,
    by_blocks,
    random_requests,
)

MASK = 7
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "mask_token_id": MASK,
    "max_position_embeddings": 512,
}
YARN = tiny_checkpoints.CONFIGS["nemotron_labs"]["rope_parameters"]
VARIANTS: dict[str, dict[str, Any]] = {
    "a2d untied, one KV head": {
        "tie_word_embeddings": False,
        "num_key_value_heads": 1,
    },
    "a2d of Qwen3's blocks": {
        "model_type": "a2d-qwen3",
        "architectures": ["A2DQwen3LMHeadModel"],
        "head_dim": 24,
        "num_hidden_layers": 3,
    },
    "a2d_bd3lm tied": {"tie_word_embeddings": True, "block_size": 16},
    "a2d_bd3lm of Qwen2's blocks": {
        "model_type": "a2d-qwen2",
        "architectures": ["A2DQwen2LMHeadModel"],
        "attention_bias": None,
        "head_dim": 16,
        "num_key_value_heads": 4,
    },
    "open_dcoder untied": {"tie_word_embeddings": False, "num_hidden_layers": 3},
    "open_dcoder one head of keys": {"num_key_value_heads": 1, "rope_theta": 1e4},
    "fast_dllm_v2 untied": {"tie_word_embeddings": False, "bd_size": 16},
    "fast_dllm_v2 all heads": {"num_key_value_heads": 4, "num_hidden_layers": 3},
    "nemotron_labs other YaRN": {
        "rope_parameters": YARN
        | {
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "llama_4_scaling_beta": 0.3,
            "mscale_all_dim": 0.5,
        },
    },
    "nemotron_labs plain RoPE, tied": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": True,
        "block_size": 12,
    },
    "sdar TraDo's config": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "max_window_layers": 3,
        "use_sliding_window": False,
        "debug": False,
    },
    "dream_reasoner": {"num_hidden_layers": 3, "block_size": 16},
}
"""Keys of configs; a name begins with that of the family."""
METHODS: list[tuple[str, str, dict[str, Any]]] = [
    (name, method, options)
    for name in VARIANTS
    for method, options in (
        ("none", {}),
        ("dual" if name.startswith(("a2d ", "open")) else "block", {}),
        *([("block", {"sub_block_cache": True})] if "fast_dllm_v2" in name else []),
        *([("focus", {})] if name.startswith(("sdar", "dream")) else []),
    )
]


@pytest.mark.parametrize(("variant", "method", "options"), METHODS)
def test_random_requests(engines, tmp_path_factory, variant, method, options):
    folder = tmp_path_factory.getbasetemp() / variant.replace(" ", "-")
    if not folder.exists():
        family, config = variant.split()[0], SIZES | VARIANTS[variant]
        tiny_checkpoints.write(family, folder, seed=5, edit=improbable_mask, **config)
    model = PlainModel(folder)
    llm = engines(
        folder,
        cache_method=method,
        cache_options=options,
        page_size=8,
        max_model_len=256,
        steps_per_dispatch=len(variant) % 2 * 3 + 1,
    )
    requests = requests_of(model, len(variant), takes_back=method == "none")
    compared = assert_answers_as(llm, requests, plain_version(model, method, options))
    assert compared >= 0.6 * len(requests), (
        "most of these requests are decided by rounding; choose others"
    )


def improbable_mask(tensors: tiny_checkpoints.Tensors) -> None:
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "head.weight")):
            tensor[MASK] *= 0.1


def requests_of(model: PlainModel, number: int, *, takes_back: bool) -> list[Request]:
    """Some end early, some are long, and some ask for what only their family has.
    ``takes_back``: the cache method lets tokens be taken back."""
    draw = random.Random(number)
    requests = random_requests(number, 8, model.is_dream)
    requests = between_blocks(requests) if model.block_length else requests
    for i, (prompt, asked) in enumerate(by_blocks(requests, number)):
        prompt[:] = [token + (token == model.mask) for token in prompt]
        if i == 0:
            asked["gen_length"] = 90
            asked.pop("steps", None)
            asked.pop("response_template", None)
        if i % 3 == 1:
            asked["stop_token_ids"] = draw.sample(range(512), 40)
            asked["early_stop"] = model.block_length is None
        if i % 2 == 0 and (takes_back or not model.is_dream):
            own_options(draw, model, asked)
    return requests


def own_options(draw: random.Random, model: PlainModel, asked: dict[str, Any]) -> None:
    counted = ("steps", "steps_per_block", "tokens_per_step")
    if model.is_dream:
        for name in [*asked]:
            if name not in ("gen_length", "block_length", "response_template", "steps"):
                del asked[name]
        asked["unmasking"] = "p2"
    elif model.is_causal:
        for name in counted:
            asked.pop(name, None)
        asked["decoding"] = draw.choice(["autoregressive", "self_speculation"])
        if asked["decoding"] == "autoregressive":
            del asked["block_length"]
    elif model.seeds_blocks:
        length = asked["block_length"]
        parts = [n for n in range(1, length + 1) if length % n == 0]
        asked["sub_block_length"] = draw.choice(parts)
