"""Settings of cache methods that mean the same give the same tokens in the same order."""

from typing import Any

import pytest

from tests.support.answers import answers

Setting = tuple[str, dict[str, Any]] | tuple[str, dict[str, Any], dict[str, Any]]
"""A cache method, its options, and what requests ask for besides."""


def refreshes(prompt: int, response: int, ratio: float, **more: Any) -> dict[str, Any]:
    return {"prompt_refresh_interval": prompt, "response_refresh_interval": response, "update_ratio": ratio} | more


SKIPS = {"keep_schedule": [[1, 0], [0.5, 0.25], [0.25, 0.5]], "block_refresh_interval": 4}
ONE_BLOCK = {"gen_length": 16, "block_length": 16}
PROFILE = [0.3, 0.1, 0.1, 0.5]
EQUAL: dict[str, tuple[Setting, Setting]] = {
    "sparse retains everything at once": (("sparse", {"retention_ratio": 1.0, "update_delay": 0}), ("dual", {})),
    # A gap of one is the prompt's last row, which Dream's rollout has no say in.
    "d2_cache computes everything": (
        ("d2_cache", {"masked_rows": 99, "rollout_p": 1.0, "gap_fill": 2}, {"tokens_per_step": 2}),
        ("none", {}, {"tokens_per_step": 2}),
    ),
    "dkv refreshes in every step": (("dkv", {"refresh_interval": 1}), ("none", {})),
    "dllm_cache refreshes in every pass": (("dllm_cache", refreshes(1, 1, 0.25)), ("none", {})),
    "dllm_cache updates every row": (("dllm_cache", refreshes(3, 7, 1.0)), ("dllm_cache", refreshes(3, 1, 0.0))),
    "maskkv without a budget": (("maskkv", refreshes(1, 1, 0.25, kv_budget=None)), ("none", {})),
    "maskkv evicts nothing": (
        ("maskkv", refreshes(6, 3, 0.25, kv_budget=99, profile=PROFILE, refresh_first_layer=True)),
        ("dllm_cache", refreshes(6, 3, 0.25)),
    ),
    "maskkv updates every row": (
        ("maskkv", refreshes(99, 99, 1.0, kv_budget=6, profile=PROFILE)),
        ("maskkv", refreshes(99, 1, 0.0, kv_budget=6, profile=PROFILE)),
    ),
    "freecache has one block": (
        ("freecache", {"include_suffix": False}, ONE_BLOCK),
        ("dllm_cache", refreshes(99, 1, 0.0), ONE_BLOCK),
    ),
    "es_dllm keeps every row": (
        ("es_dllm", SKIPS | {"keep_schedule": [[1, 0]]}),
        ("es_dllm", SKIPS | {"block_refresh_interval": 1}),
    ),
    "es_dllm refreshes everything": (
        ("es_dllm", SKIPS | {"prompt_refresh_interval": 1}, ONE_BLOCK),
        ("none", {}, ONE_BLOCK),
    ),
    "sparse retains less by request": (
        ("sparse", {"retention_ratio": 0.5}, {"retention_ratio": 0.25}),
        ("sparse", {"retention_ratio": 0.25}),
    ),
    "es_dllm retains less by request": (
        ("es_dllm", SKIPS | {"retention_ratio": 0.5}, {"retention_ratio": 0.25}),
        ("es_dllm", SKIPS | {"retention_ratio": 0.25}),
    ),
    "maskkv retains less by request": (
        ("maskkv", refreshes(6, 3, 0.25, kv_budget=None, profile=PROFILE), {"retention_ratio": 0.5}),
        ("maskkv", refreshes(6, 3, 0.25, kv_budget=None, profile=PROFILE, retention_ratio=0.5)),
    ),
}
MODELS = ["llada-tiny-a", "dream-tiny-a"]
PROMPTS = [[(7 * i * i + 3 * i * k + 11 * k) % 480 for i in range(length)] for k, length in enumerate([24, 37, 50, 9])]
ASKED = {"gen_length": 20, "block_length": 8}


@pytest.mark.parametrize(
    ("name", "model"),
    # By turns. With a cache Dream fills a block's first position alone also where there is one block.
    [
        (name, MODELS[number % 2 if name not in ("es_dllm refreshes everything", "freecache has one block") else 0])
        for number, name in enumerate(EQUAL)
    ],
)
def test_settings_that_mean_the_same(engines, reference_checkpoints, name, model):
    found = []
    for method, options, *asked in EQUAL[name]:
        llm = engines.shared(
            reference_checkpoints / model, page_size=8, max_model_len=128, cache_method=method, cache_options=options
        )
        fields = ASKED | (asked[0] if asked else {})
        found.append([(answer.tokens, answer.order) for answer in answers(llm, [(p, fields) for p in PROMPTS])])
    assert found[0] == found[1]
