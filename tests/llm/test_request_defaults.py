"""What an engine does for requests that name nothing: its ``request_defaults``, and the
checkpoint's own.
"""

import argparse
import json

import pytest

from dllm_engine.admission import resolved_params
from dllm_engine.cli.engine import DECODING, add_decoding_arguments, chosen_arguments
from dllm_engine.decoding.spec import Guidance
from dllm_engine.decoding.unmasking_policies import SlowFast
from dllm_engine.demo import DEMO_MODELS
from dllm_engine.families import DREAM, FAMILIES, LLADA
from dllm_engine.options import EngineOptions
from dllm_engine.params import DiffusionParams
from dllm_engine.request_options.defaults import check_request_defaults
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.resolve import resolve_decoding
from tests.support import plans, tiny_checkpoints
from tests.support.engines import start_engine


def resolved(defaults, family=LLADA, *, engine=None, gen_length=64, **asked):
    options = EngineOptions.parse({"request_defaults": defaults} | (engine or {}))
    return plans.resolved(family, options, gen_length=gen_length, **asked)


DEFAULTS = {"block_length": 16, "steps": 32, "unmasking": "random"}
THRESHOLD = {"threshold": 0.9}
FITTED = {"block_length": 32, "steps": 48}
SEVERAL = {"entropy_threshold": 0.5, "block_add_threshold": 0.1}
SPARSE = {
    "engine": {"cache_method": "sparse", "cache_options": {"retention_ratio": 0.6}}
}
UNEVEN = {"gen_length": 20, "block_length": 8}
DREAMS = SlowFast(
    span_threshold=0.1, slow_threshold=0.8, slow_minimum=3, fast_minimum=2
)


@pytest.mark.parametrize(
    ("defaults", "asked", "expected"),
    [
        (DEFAULTS, {}, DEFAULTS),
        (
            DEFAULTS,
            OWN := {"block_length": 8, "steps": 64, "unmasking": "low_confidence"},
            OWN,
        ),
        # A rule is for requests that name neither steps nor another rule.
        (THRESHOLD, {}, {"parallel": ("threshold", 0.9)}),
        (THRESHOLD, {"steps": 16}, {"parallel": None}),
        ({"retention_ratio": 0.4}, SPARSE, {"retention_ratio": 0.4}),
        # They are fitted to the response, with a step per block at least.
        (FITTED, {"gen_length": 8}, {"block_length": 8, "steps": 8}),
        (FITTED, {"gen_length": 2048}, {"block_length": 32, "steps": 64}),
        # Who names steps, or SlowFast sampling, runs one block at a time.
        (SEVERAL, {"threshold": 0.9}, {"block_add_threshold": 0.1}),
        (
            SEVERAL,
            {"steps": 8},
            {"block_add_threshold": None, "parallel": None, "steps": 8},
        ),
        (SEVERAL, {"slow_fast": {}}, {"block_add_threshold": None}),
        # Tokens per step, and steps per block, take the place of steps.
        (
            {"steps": 4},
            UNEVEN | {"tokens_per_step": 3},
            {"steps": 8, "steps_per_block": (3, 3, 2)},
        ),
        (
            {"steps": 4},
            UNEVEN | {"steps_per_block": 5},
            {"steps": 14, "steps_per_block": (5, 5, 4)},
        ),
        # Positions are drawn, or a rule takes them: who names one gets no default of
        # the other.
        (DRAWN := {"alg_temp": 0.5}, {}, {"alg_temp": 0.5, "parallel": None}),
        (DRAWN, {"threshold": 0.5}, {"alg_temp": 0.0, "parallel": ("threshold", 0.5)}),
        (
            SEVERAL,
            {"alg_temp": 0.5},
            {"alg_temp": 0.5, "block_add_threshold": None, "parallel": None},
        ),
        (
            {"logits_eos_inf": True},
            {"logits_eos_inf": False},
            {"barred": ()},
        ),
        (
            {},
            {"family": DREAM, "slow_fast": {"slow_minimum": 3}},
            {"slow_fast": DREAMS},
        ),
        (
            {"slow_fast": '{"fast_threshold": 0.5}'},
            {},
            {"parallel": ("slow_fast", 0.5), "unmasking": "low_confidence"},
        ),
        ({"slow_fast": {}}, THRESHOLD, {"slow_fast": None}),
        ({"slow_fast": {}}, SEVERAL, {"slow_fast": None, "block_add_threshold": 0.1}),
        # What does not suit the policy or the rule that a request names is left out.
        (
            {"unmasking": "entropy"},
            {"factor": 2.0},
            {"unmasking": "low_confidence", "parallel": ("factor", 2.0)},
        ),
        (
            {"unmasking": "random"},
            THRESHOLD,
            {"unmasking": "low_confidence", "parallel": ("threshold", 0.9)},
        ),
        (
            {"unmasking": "topk_margin"},
            {"margin": 0.5},
            {"unmasking": "topk_margin", "parallel": ("margin", 0.5)},
        ),
        (
            {"unmasking": "entropy"},
            {"certainty_sigma": 9.0},
            {"unmasking": "low_confidence", "certainty_sigma": 9.0},
        ),
        ({"certainty_sigma": 9.0}, {"entropy_bound": 0.5}, {"certainty_sigma": None}),
        (
            {"factor": 2.0},
            {"unmasking": "entropy"},
            {"unmasking": "entropy", "parallel": None},
        ),
        (
            DRAWN,
            {"unmasking": "sequential"},
            {"alg_temp": 0.0, "unmasking": "sequential"},
        ),
        (
            {"confidence_eos_eot_inf": True},
            {"unmasking": "random"},
            {"least_confident": frozenset()},
        ),
        ({"early_stop": True}, {"ignore_eos": True}, {"early_stop": False}),
    ],
    ids=str,
)
def test_they_are_for_requests_that_name_nothing_and_come_before_the_familys(
    defaults, asked, expected
):
    spec = resolved(defaults, **asked)
    assert expected.items() <= plans.settings_of(spec).items()


LENIENT = {"guide_top_k": 2, "guide_threshold": 0.5}


@pytest.mark.parametrize(
    ("defaults", "asked", "expected"),
    [
        (LENIENT, {"guide_top_k": 3}, Guidance(top_k=3, threshold=0.5)),
        (LENIENT, {"guided": False}, None),
        # Defaults that the guide has no use for are for those that do without it.
        (LENIENT | {"threshold": 0.9}, {}, Guidance(top_k=2, threshold=0.5)),
        # Guided only where a request says so, or how.
        (LENIENT | {"guided": False}, {}, None),
        ({"guided": False}, {"guide_correction": True}, Guidance(correction=True)),
    ],
    ids=str,
)
def test_those_of_a_guide(defaults, asked, expected):
    spec = resolved(defaults, engine={"guide_model": "demo"}, **asked)
    assert spec.guidance == expected
    assert (spec.unmasking.parallel is None) == (
        expected is not None or "threshold" not in asked
    )


BLOCKS = {"block_add_threshold": 0.2, "ignore_eos": True}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        # Nothing is fitted that a request names itself.
        ({"steps": 2}, "steps=2 is out of range"),
        (
            BLOCKS | {"slow_fast": {}},
            r"slow_fast=\{\} and block_add_threshold=0.2: spans are in one block",
        ),
        (
            BLOCKS,
            "block_add_threshold=0.2: several blocks at once need a rule of parallel "
            "unmasking",
        ),
        # A policy that ignores the threshold.
        (
            BLOCKS | THRESHOLD | {"unmasking": "random"},
            "several blocks at once need a rule",
        ),
        (
            BLOCKS | THRESHOLD | {"steps_per_block": 2},
            "steps_per_block=2: blocks that run at once share their steps",
        ),
        (
            BLOCKS | THRESHOLD | {"early_stop": True},
            "early_stop=True: the request has no end token",
        ),
        (
            BLOCKS | {"entropy_threshold": 1.0, "unmasking": "entropy"},
            "choose low_entropy",
        ),
    ],
    ids=str,
)
def test_what_a_request_cannot_have_is_named(asked, message):
    with pytest.raises(InvalidRequestError, match=message):
        resolved({"block_length": 4}, gen_length=16, **asked)


def test_steps_for_fewer_than_all_parts_of_blocks_are_refused():
    family = FAMILIES["Fast_dLLM_QwenForCausalLM"]
    message = "each of the 8 parts of 2 tokens needs at least one; raise steps or sub_"
    with pytest.raises(InvalidRequestError, match=message):
        resolved(
            {"block_length": 4, "sub_block_length": 2}, family, gen_length=16, steps=5
        )


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        (
            {"block_length": 0},
            "request_defaults: request default block_length=0.* greater than or equal "
            "to 1",
        ),
        (
            {"retention_ratio": 0.5},
            "retention_ratio=0.5.* cache_method='auto' evicts nothing",
        ),
        (
            {"stream_granularity": "step"},
            "no 'stream_granularity'.* block_length, sub_block_length, suffix_blocks",
        ),
        ({"steps": 8, "tokens_per_step": 2}, "steps=8 and tokens_per_step=2"),
        ({"guide_top_k": 2}, "guide_top_k=2: the engine has no guide"),
    ],
    ids=str,
)
def test_those_that_could_serve_no_request_are_refused_at_start(defaults, message):
    with pytest.raises(ValueError, match=message):
        check_request_defaults(EngineOptions.parse({"request_defaults": defaults}))


@pytest.fixture(scope="module")
def opinionated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opinionated")
    tiny_checkpoints.write("llada", folder, dllm={"block_length": 8, "steps": 12})
    (folder / "generation_config.json").write_text(
        json.dumps({"max_new_tokens": 24, "temperature": 0.5})
    )
    return folder


def decoded(llm, params=None):
    """(response tokens, tokens of a block, forward passes) of a request."""
    whole_block = [3, 1, 4, 1, 5, 9, 4, 6]
    params = params or DiffusionParams()
    (output,) = llm.generate({"prompt_token_ids": whole_block}, params, use_tqdm=False)
    config = llm.llm_engine.vllm_config
    params = resolved_params(params, whole_block, None, config)
    spec = resolve_decoding(
        params,
        len(whole_block),
        config.model_config.hf_config,
        EngineOptions.from_vllm_config(config),
    )
    return (
        spec.layout.gen_length,
        spec.layout.block_length,
        output.outputs[0].diffusion.forward_passes,
    )


def test_a_checkpoint_has_defaults_of_its_own_which_come_behind_the_engines_and_the_requests(
    engines, opinionated
):
    llm = engines(opinionated)
    assert decoded(llm, DiffusionParams(ignore_eos=True)) == (24, 8, 12)
    # As vLLM's server and its own class ask.
    assert llm.model_config.get_diff_sampling_param() == {
        "temperature": 0.5,
        "max_tokens": 24,
    }
    assert llm.get_default_sampling_params().temperature == 0.5
    fitted = resolved_params(
        DiffusionParams(), [5] * 250, None, llm.llm_engine.vllm_config
    )
    assert fitted.max_tokens == 6, "what fits"
    llm = engines(opinionated, request_defaults={"block_length": 12})
    assert decoded(llm, DiffusionParams(ignore_eos=True)) == (24, 12, 12)
    assert decoded(
        llm, DiffusionParams(ignore_eos=True, block_length=6, gen_length=18, steps=9)
    ) == (18, 6, 9)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"block_length": 0},
            r"config\.json: 'dllm'.* block_length=0.* greater than or equal to 1",
        ),
        (
            {"retention_ratio": 0.5},
            r"config\.json: 'dllm' takes no 'retention_ratio'.* block_length, sub_block_length, steps",
        ),
        ([8], r"config\.json: 'dllm'=\[8\] must be an object"),
    ],
    ids=str,
)
def test_defaults_of_a_checkpoint_that_mean_nothing_are_refused_at_start(
    tmp_path, section, message
):
    with pytest.raises(ValueError, match=message):
        start_engine(tiny_checkpoints.write("llada", tmp_path, dllm=section))


@pytest.mark.parametrize("model", DEMO_MODELS)
def test_a_demo_model_is_asked_as_it_was_trained_wherever_it_is_asked(engines, model):
    llm = engines(model, skip_tokenizer_init=False)
    assert decoded(llm, DiffusionParams(ignore_eos=True)) == (32, 8, 32)
    assert decoded(llm, llm.get_default_sampling_params())[:2] == (32, 8)
    assert llm.model_config.get_diff_sampling_param() == {
        "temperature": 0.0,
        "max_tokens": 32,
    }
    parser = argparse.ArgumentParser()
    add_decoding_arguments(parser)
    assert chosen_arguments(parser.parse_args([]), DECODING) == {}
