"""Every cache method: requests in all phases share a batch, nothing stale is read, and no page is lost."""

import random
from itertools import cycle

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.scheduler.methods import CACHE_METHODS
from tests.support.engines import runner_of, scheduler_of
from tests.support.stepped_engines import Poison, abort_all, run_in_steps

REFRESHES = {"prompt_refresh_interval": 4, "response_refresh_interval": 3, "update_ratio": 0.25}
SKIPS = {"keep_schedule": [[1, 0], [0.5, 0.25], [0.25, 0.5]], "block_refresh_interval": 4}
VARIANTS = {
    "none": ("none", {}),
    "prefix": ("prefix", {}),
    "dual": ("dual", {}),
    "dual, response": ("dual", {"refresh": "response", "prompt_refresh_interval": 8}),
    "dual, near": ("dual", {"refresh": "near", "prompt_refresh_interval": 2, "near_tokens": 3}),
    "sparse": ("sparse", {"retention_ratio": 0.4}),
    "sparse, response": ("sparse", {"retention_ratio": 0.4, "refresh": "response"}),
    "sparse, late, prefix": ("sparse", {"retention_ratio": 0.4, "update_delay": 3, "scope": "prefix"}),
    "dkv": ("dkv", {"refresh_interval": 5}),
    "freecache": ("freecache", {}),
    "delayed": ("delayed", {"cache_delay": 2, "refresh_interval": 5}),
    "d2_cache": ("d2_cache", {"masked_rows": 6}),
    "d2_cache, latest": ("d2_cache", {"masked_rows": 4, "confidence": "latest", "range_unit": "block", "gap_fill": 3}),
    "freecache, block alone": ("freecache", {"include_suffix": False}),
    "freecache, cache blocks": ("freecache", {"cache_block_length": 40}),
    "dllm_cache": ("dllm_cache", REFRESHES),
    "dllm_cache by key": ("dllm_cache", REFRESHES | {"similarity": "key"}),
    "dllm_cache, first layer too": ("dllm_cache", REFRESHES | {"refresh_first_layer": False}),
    "dllm_cache, prompt states": ("dllm_cache", REFRESHES | {"exclude_prompt_states": False}),
    "maskkv": ("maskkv", REFRESHES | {"kv_budget": 12}),
    "maskkv, first layer": ("maskkv", REFRESHES | {"kv_budget": 12, "refresh_first_layer": True}),
    "maskkv, prompt states": ("maskkv", REFRESHES | {"kv_budget": 12, "exclude_prompt_states": False}),
    "es_dllm": ("es_dllm", SKIPS),
    "es_dllm by query": ("es_dllm", SKIPS | {"indicator": "query"}),
    "es_dllm by change alone": ("es_dllm", SKIPS | {"alpha": 0.0}),
    "es_dllm without indicator": ("es_dllm", SKIPS | {"indicator": "none"}),
    "es_dllm, eviction": ("es_dllm", SKIPS | {"retention_ratio": 0.4}),
    "es_dllm, eviction at once": (
        "es_dllm",
        SKIPS | {"retention_ratio": 0.4, "update_delay": 0, "prompt_refresh_interval": 5, "indicator": "value"},
    ),
    "block": ("block", {}),
}
ADAPTIVE_SCOPES = {"all", "prompt", "response", "active"}
LENGTHS = [
    *[(24, 16, 8, 16), (37, 12, 12, 12), (50, 20, 10, 20), (9, 8, 4, 8), (24, 16, 8, None), (30, 16, 16, 8)],
    (3, 5, 5, 5),
]
"""Prompt, response, block and steps; without steps by a threshold."""
JOINS = [0, 1, 2, 4, 5, 12, 13]
MODELS = ["llada-tiny-a", "dream-tiny-a", "llada-moe-tiny-a"]
EACH_WITH_A_MODEL = [
    *zip([name for name in VARIANTS if name != "block"], cycle(MODELS)),
    *[("none", "llada2-moe-tiny-a"), ("block", "sdar-tiny-a"), ("block", "llada2-moe-tiny-a")],
]


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(480) for _ in range(length)]


def request(gen_length: int, block_length: int, steps: int | None):
    rule = {"threshold": 0.3} if steps is None else {"steps": steps}
    asked = {"gen_length": gen_length, "block_length": block_length, "unmasking": "maskgit_plus", "ignore_eos": True}
    return DiffusionParams(**asked, **rule, seed=gen_length)  # of what a cache method draws


PROMPTS = [prompt(case[0], i) for i, case in enumerate(LENGTHS)]


@pytest.fixture
def engine(engines, reference_checkpoints):
    def make(variant: str, model: str):
        method, options = VARIANTS[variant]
        checkpoint = reference_checkpoints / model
        return engines.shared(checkpoint, page_size=8, max_model_len=128, cache_method=method, cache_options=options)

    return make


@pytest.mark.parametrize(("variant", "model"), EACH_WITH_A_MODEL)
def test_requests_in_all_phases_share_a_batch(engine, variant, model):
    """Each is answered as alone, although pages hold NaN wherever nothing has been written for it. Every second one is
    asked alone, the others with the next variant."""
    llm = engine(variant, model)
    pages, params = scheduler_of(llm).pages, [request(*case[1:]) for case in LENGTHS]
    llm.reset_prefix_cache()
    poison = Poison(llm) if runner_of(llm).pages is not None else None

    def after_step() -> None:
        assert pages.num_allocated <= pages.num_reserved <= pages.num_pages
        if poison:
            poison()

    together = run_in_steps(llm, PROMPTS, params, joins=JOINS, after_step=after_step)
    if poison:
        assert poison.num_given_back > 0
    if VARIANTS[variant][0] in ("dllm_cache", "maskkv"):
        assert ADAPTIVE_SCOPES in [{plan.scope.value for plan in plans} for plans in together.plans]
    for i in range(list(VARIANTS).index(variant) % 2, len(LENGTHS), 2):
        llm.reset_prefix_cache()  # else less is fed
        alone = run_in_steps(llm, PROMPTS[i : i + 1], params[i : i + 1])
        assert together.tokens[i] == alone.tokens[0], i
        assert together.figures[i].trace == alone.figures[0].trace, i
        assert together.figures[i].tokens_computed == alone.figures[0].tokens_computed, i


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name in CACHE_METHODS or name == "es_dllm, eviction"])
def test_aborting_in_any_state_leaks_no_page(engine, variant):
    llm = engine(variant, "sdar-tiny-a" if variant == "block" else "dream-tiny-a")
    lengths = [random.Random(i).choice(LENGTHS) for i in range(30)]
    prompts, params = [prompt(case[0], i) for i, case in enumerate(lengths)], [request(*case[1:]) for case in lengths]
    scopes = abort_all(llm, prompts, params, seed=5)
    assert scopes >= (ADAPTIVE_SCOPES if variant in ("dllm_cache", "maskkv") else {"all"})


def test_every_method_is_among_the_variants():
    assert {method for method, _ in VARIANTS.values()} == set(CACHE_METHODS)
