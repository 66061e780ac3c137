"""Options of cache methods: what is out of range is named, and what is left open is the
paper's.
"""

from typing import Any

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.decoding.unmasking_policies import UNMASKING_POLICIES
from dllm_engine.families import DREAM, LLADA
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.unmasking import PARALLEL_OPTIONS
from dllm_engine.vllm_hooks import engine_config
from tests.support.engines import generate, scheduler_of
from tests.support.plans import resolved


@pytest.mark.parametrize(
    ("method", "options", "named"),
    [
        (
            "sparse",
            {"retention_ratio": 1.1},
            "retention_ratio=1.1.*less than or equal to 1",
        ),
        (
            "dkv",
            {"refresh_interval": 0},
            "refresh_interval=0.*greater than or equal to 1",
        ),
        ("maskkv", {"scorer": "best"}, "scorer='best'.*'mean_query'"),
        ("sparse", {"pool_kernel_size": 4}, "pool_kernel_size=4"),
        (
            "sparse",
            {"refresh": "near"},
            r"refresh='near': Input should be 'all' or 'response'",
        ),
        ("freecache", {"include_suffix": "half"}, "include_suffix='half'"),
        ("dual", {"retention_ratio": 0.5}, "'retention_ratio'=0.5"),
        (
            "dllm_cache",
            {"kv_budget": 9},
            "unknown cache option 'kv_budget'=9.*prompt_refresh_interval",
        ),
        (
            "dllm_cache",
            {"similarity": "random", "similarity_metric": "l2"},
            "nothing, so similarity_metric='l2'",
        ),
        ("es_dllm", {"keep_schedule": []}, "must begin with depth 0"),
        (
            "es_dllm",
            {"keep_schedule": [[1, 0], [0.5, 0.5], [0.2, 0.5]]},
            "depths must rise",
        ),
        ("es_dllm", {"keep_schedule": [[1, 0], [0.5, 1]]}, "depths must rise within"),
        ("es_dllm", {"keep_schedule": [[1, 0], [0, 0.5]]}, "fractions must fall"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_named(method, options, named):
    with pytest.raises(ValueError, match=named):
        EngineOptions.parse({"cache_method": method, "cache_options": options})


@pytest.mark.parametrize(
    ("name", "expected"),
    [("/models/llada-8b-base", (25, 5)), ("Dream-org/Dream-v0-Instruct-7B", (50, 2))],
)
def test_intervals_of_dllm_cache_are_the_papers_for_each_model(name, expected):
    family = DREAM if "Dream" in name else LLADA
    assert EngineOptions(cache_method="dllm_cache").method.settings_for(name, family)[
        0
    ], "the name tells"
    for chosen in ({}, "paper"):
        cache: Any = (
            EngineOptions(cache_method="dllm_cache", cache_options=chosen)
            .with_paper_settings(name, family)
            .cache
        )
        assert (
            cache.prompt_refresh_interval,
            cache.response_refresh_interval,
        ) == expected
        assert (cache.update_ratio, cache.similarity) == (0.25, "value")
        assert cache.exclude_prompt_states
        assert cache.refresh_first_layer
    own = EngineOptions(
        cache_method="dllm_cache", cache_options={"response_refresh_interval": 9}
    )
    cache = own.with_paper_settings(name, family).cache
    assert (cache.prompt_refresh_interval, cache.response_refresh_interval) == (
        expected[0],
        9,
    )


@pytest.mark.parametrize(
    ("model", "expected"), [("llada-tiny-a", (50, 7)), ("dream-tiny-a", (50, 2))]
)
def test_an_engine_starts_with_the_papers_settings(
    engines, reference_checkpoints, lines_of, model, expected
):
    told = lines_of(engine_config.logger, "warning_once")
    settings = {"page_size": 8, "max_model_len": 95, "cache_method": "dllm_cache"}
    llm = engines(reference_checkpoints / model, **settings)
    (line,) = told
    assert f"{model} contains none of " in line
    assert (
        f"those of 'instruct': prompt_refresh_interval=50, "
        f"response_refresh_interval={expected[1]}. Set" in line
    )
    cache: Any = scheduler_of(llm).options.cache
    assert (cache.prompt_refresh_interval, cache.response_refresh_interval) == expected
    (output,) = generate(
        llm,
        [[5] * 12],
        DiffusionParams(gen_length=16, block_length=16, ignore_eos=True),
    )
    states = output.outputs[0].diffusion.refresh_states
    assert states == [
        "reuse" if number % expected[1] else "update" for number in range(16)
    ]


def test_cache_blocks_of_freecache_are_whole_blocks():
    engine = EngineOptions(
        cache_method="freecache", cache_options={"cache_block_length": 24}
    )
    length: dict[str, Any] = {"gen_length": 48}
    for suited in (
        {"block_length": 8},
        {"block_length": 24},
        {"block_length": 48},
        {"gen_length": 10},
    ):
        resolved(engine=engine, **length | suited)
    with pytest.raises(
        InvalidRequestError,
        match="block_length=16 does not divide the engine's cache_block_length=24",
    ):
        resolved(engine=engine, gen_length=48, block_length=16)


@pytest.mark.parametrize("method", ["dual", "dllm_cache"])
def test_lowering_retention_needs_a_method_that_evicts(method):
    with pytest.raises(InvalidRequestError, match=f"'{method}' evicts nothing"):
        resolved(
            engine=EngineOptions(cache_method=method), gen_length=8, retention_ratio=0.5
        )


@pytest.mark.parametrize("method", ["sparse", "es_dllm", "maskkv"])
def test_a_request_may_retain_less_than_the_engine_but_no_more(method):
    engine = EngineOptions(cache_method=method, cache_options={"retention_ratio": 0.5})
    for ratio in (0.0, 0.5):
        cache: Any = resolved(engine=engine, gen_length=8, retention_ratio=ratio).cache
        assert cache.retention_ratio == ratio
    with pytest.raises(InvalidRequestError, match=r"retention_ratio=0\.9"):
        resolved(engine=engine, gen_length=8, retention_ratio=0.9)


VALUES = dict.fromkeys(PARALLEL_OPTIONS, 0.5) | {"slow_fast": {}}
MEASURED_BY = {
    **dict.fromkeys(("threshold", "factor"), ("low_confidence", "maskgit_plus")),
    **dict.fromkeys(("entropy_bound", "entropy_budget"), ("low_entropy", "entropy")),
    "margin": ("topk_margin",),
    "entropy_threshold": ("low_entropy",),
    "slow_fast": ("low_confidence",),
}
"""Policies that measure what a rule needs: LLaDA's default, and the
last one Dream's.
"""


@pytest.mark.parametrize("family", [LLADA, DREAM], ids=lambda family: family.name)
@pytest.mark.parametrize("rule", PARALLEL_OPTIONS)
def test_a_rule_goes_with_the_policies_that_measure_what_it_needs(family, rule):
    suited = MEASURED_BY[rule]
    for unmasking in [None, *UNMASKING_POLICIES]:
        asked: dict[str, Any] = {
            "gen_length": 7,
            "block_length": 4,
            "unmasking": unmasking,
            rule: VALUES[rule],
        }
        if unmasking is None or unmasking in suited:
            spec = resolved(family, **asked)
            assert spec.unmasking.parallel is not None
            assert spec.unmasking.policy.name == (
                unmasking or suited[0 if family is LLADA else -1]
            )
        elif rule == "threshold":  # which leaves others to their count
            assert resolved(family, **asked).unmasking.parallel is None
        else:
            with pytest.raises(
                InvalidRequestError,
                match=f"goes by .* unmasking={unmasking!r} does not measure",
            ):
                resolved(family, **asked)


@pytest.mark.parametrize(
    ("model", "asked", "reason"),
    [
        ("llada2", {"edit_threshold": 0.9}, r"edit_threshold unset, or use .*'block'"),
        ("fast_dllm_v2", {}, "rows by the position that they predict"),
    ],
)
def test_focus_refuses_what_its_rows_do_not_allow(
    engines, request, model, asked, reason
):
    checkpoint = request.getfixturevalue(f"tiny_{model}")
    llm = engines(checkpoint, cache_method="focus")
    params = DiffusionParams(gen_length=8, **asked)
    with pytest.raises(ValueError, match=reason):
        llm.generate({"prompt_token_ids": [1, 2]}, params, use_tqdm=False)
