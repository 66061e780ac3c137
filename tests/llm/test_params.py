"""``DiffusionParams``: made, shown, changed, copied."""

import copy
import math
import pickle

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.vllm_hooks import patch, table

patch.apply(
    table.SERVING
)  # as an engine does when it starts: some refusals are vLLM's, in our words

SETTINGS = [
    {},
    {
        "max_tokens": 32,
        "steps": 4,
        "unmasking": "random",
        "temperature": 0.7,
        "seed": 3,
    },
    {
        "threshold": 0.9,
        "top_p": 0.5,
        "top_k": 4,
    },  # greedy: vLLM would reset the last two
    {
        "stop": ["\n"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "n": 2,
        "temperature": 1.0,
        "logprobs": 2,
    },
    {"extra_args": {"block_length": 4, "of_another_plugin": 1}},
    {"gen_length": "auto", "max_tokens": 100, "auto_length_start": 8},
    {"gen_length": 7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "copied",
    [
        lambda params: params.clone(),
        copy.copy,
        copy.deepcopy,
        lambda params: pickle.loads(pickle.dumps(params)),
        lambda params: eval(repr(params)),
    ],
    ids=["clone", "copy", "deepcopy", "pickle", "repr"],
)
def test_a_copy_is_equal_and_its_own(settings, copied):
    params = DiffusionParams(**settings)
    twin = copied(params)
    assert type(twin) is DiffusionParams
    assert twin == params
    assert repr(twin) == repr(params)
    twin.gen_length = 77
    twin.block_length = 7
    assert params == DiffusionParams(**settings)
    assert twin != params


def test_repr_shows_what_was_given():
    assert repr(DiffusionParams()) == "DiffusionParams()"
    params = DiffusionParams(max_tokens=32, threshold=0.9, seed=1, stop="x")
    assert (
        repr(params)
        == "DiffusionParams(max_tokens=32, threshold=0.9, seed=1, stop=['x'])"
    )


def test_a_field_that_is_set_later_counts_as_one_that_was_given():
    params = DiffusionParams(gen_length=32, block_length=8, threshold=0.9, seed=1)
    params.seed += 1
    params.block_length = 16
    params.max_tokens = 64
    params.threshold = None
    params.factor = 0.5
    params.top_p = 0.5
    wanted = DiffusionParams(
        gen_length=64, block_length=16, factor=0.5, seed=2, top_p=0.5
    )
    assert params == wanted
    assert params.to_sampling_params() == wanted.to_sampling_params()
    others = {"block_length": 16, "factor": 0.5, "top_p": 0.5}
    assert params.extra_args == {"auto_length": False, **others}


def test_what_the_caller_put_into_extra_args_is_shown_and_kept():
    given = {"block_length": 4, "of_another_plugin": 1}
    params = DiffusionParams(extra_args=given)
    assert params.block_length == 4
    params.block_length = 8
    assert params.extra_args == {"block_length": 8, "of_another_plugin": 1}
    assert given == {"block_length": 4, "of_another_plugin": 1}


REFUSED = [
    ({"block_length": 0}, "block_length=0: Input should be greater than or equal to 1"),
    (
        {"gen_length": 0},
        "gen_length=0 is out of range: it must be a whole number, at least 1",
    ),
    ({"gen_length": 8, "max_tokens": 9}, "name the same length"),
    (
        {"unmasking": "best"},
        "unmasking='best' is unknown; choose one of low_confidence",
    ),
    (
        {"threshold": 0.9, "margin": 0.5},
        "margin=0.5 and threshold=0.9: a step unmasks by one rule",
    ),
    ({"factor": math.inf}, "factor=inf: Input should be a finite number"),
    (
        {"steps_per_block": 4, "tokens_per_step": 2},
        "steps_per_block=4 and tokens_per_step=2 both say how many tokens",
    ),
    (
        {"steps_per_block": 4, "slow_fast": {}},
        "slow_fast={} and steps_per_block=4: passes over spans do not count",
    ),
    (
        {"certainty_sigma": 9.0, "unmasking": "entropy"},
        "certainty_sigma=9.0 weights probabilities and margins",
    ),
    (
        {"alg_temp": 0.1, "unmasking": "origin"},
        "alg_temp=0.1 draws positions by their probability, entropy or margin",
    ),
    (
        {"alg_temp": 0.1, "threshold": 0.9},
        "alg_temp=0.1 draws a fixed count of positions, and threshold counts them",
    ),
    (
        {"confidence_eos_eot_inf": True, "unmasking": "random"},
        "unmasking='random' does not measure; choose low_conf",
    ),
    (
        {"slow_fast": {"span_step": 3}},
        "unknown slow_fast option 'span_step'=3; did you mean 'span_steps'?",
    ),
    ({"slow_fast": "{"}, "slow_fast='{': it is not JSON"),
    ({"n": 2}, "n=2 needs a temperature above 0"),
    ({"stream_granularity": "word"}, "'block' or 'step'"),
    ({"extra_args": {"steps": 0}}, "steps=0"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=str)
def test_a_bad_value_is_refused_where_the_parameters_are_made(settings, message):
    with pytest.raises(InvalidRequestError) as caught:
        DiffusionParams(**settings)
    assert message in str(caught.value)


def test_a_bad_value_that_is_set_later_changes_nothing():
    params = DiffusionParams(gen_length=16, block_length=8, threshold=0.9)
    for name, value in (("block_length", 0), ("margin", 0.5), ("gen_length", 0)):
        with pytest.raises(InvalidRequestError, match=name):
            setattr(params, name, value)
    assert params == DiffusionParams(gen_length=16, block_length=8, threshold=0.9)


def test_an_unknown_field_is_named():
    with pytest.raises(TypeError, match="block_lenght"):
        DiffusionParams(block_lenght=8)
