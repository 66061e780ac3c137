"""``request_defaults``: what an engine does for requests that name nothing."""

import pytest

from dllm_engine.families import FAMILIES
from dllm_engine.options import EngineOptions
from dllm_engine.params import DiffusionParams, InvalidRequestError, resolve_decoding
from tests.engines import generate

LLADA, DREAM = FAMILIES["llada"], FAMILIES["Dream"]


def resolved(defaults, family=LLADA, *, engine=None, gen_length=64, **asked):
    options = EngineOptions.parse({"request_defaults": defaults} | (engine or {}))
    return resolve_decoding(DiffusionParams(gen_length=gen_length, **asked), 10, family, options)


def test_they_are_for_requests_that_name_nothing():
    defaults = {"block_length": 16, "steps": 32, "unmasking": "random"}
    spec = resolved(defaults)
    assert (spec.block_length, spec.steps, spec.unmasking) == (16, 32, "random")
    spec = resolved(defaults, block_length=8, steps=64, unmasking="low_confidence")
    assert (spec.block_length, spec.steps, spec.unmasking) == (8, 64, "low_confidence")


def test_they_come_before_the_familys():
    assert resolved({}, DREAM).block_length == 64
    assert resolved({"block_length": 16}, DREAM).block_length == 16


@pytest.mark.parametrize(
    ("gen_length", "block_length", "steps"),
    [(8, 8, 8), (32, 32, 32), (64, 32, 48), (2048, 32, 64)],
    ids=["a short response", "as long as a block", "as they are", "a step per block"],
)
def test_they_are_fitted_to_the_response(gen_length, block_length, steps):
    spec = resolved({"block_length": 32, "steps": 48}, gen_length=gen_length)
    assert (spec.block_length, spec.steps) == (block_length, steps)


def test_what_a_request_names_itself_is_not_fitted():
    with pytest.raises(InvalidRequestError, match="block_length=32 is out of range"):
        resolved({"block_length": 4}, gen_length=16, block_length=32)
    with pytest.raises(InvalidRequestError, match="steps=2 is out of range"):
        resolved({"block_length": 4}, gen_length=16, steps=2)


def test_a_rule_is_for_requests_that_name_neither_steps_nor_another():
    assert resolved({"threshold": 0.9}).parallel == ("threshold", 0.9)
    assert resolved({"threshold": 0.9}, threshold=0.5).parallel == ("threshold", 0.5)
    assert resolved({"threshold": 0.9}, factor=1.5).parallel == ("factor", 1.5)
    assert resolved({"threshold": 0.9}, steps=16).parallel is None
    assert resolved({"threshold": 0.9}, steps=16, threshold=0.5).parallel == ("threshold", 0.5)


def test_a_lower_retention_ratio():
    engine = {"cache_method": "sparse", "cache_options": {"retention_ratio": 0.6}}
    assert resolved({"retention_ratio": 0.4}, engine=engine).cache.retention_ratio == 0.4
    assert resolved({"retention_ratio": 0.4}, engine=engine, retention_ratio=0.5).cache.retention_ratio == 0.5


@pytest.mark.parametrize(
    ("defaults", "fragments"),
    [
        ({"block_length": 0}, ("request default block_length=0", "greater than or equal to 1")),
        ({"steps": "many"}, ("request default steps='many'",)),
        ({"threshold": 1.5}, ("request default threshold=1.5",)),
        ({"unmasking": "best"}, ("unmasking='best' is unknown", "low_confidence")),
        ({"retention_ratio": 0.5}, ("retention_ratio=0.5", "cache_method='none' evicts nothing")),
        ({"stream_granularity": "step"}, ("no 'stream_granularity'", "block_length, steps")),
        ({"top_p": 0.9}, ("no 'top_p'",)),
        ({"stepz": 3}, ("no 'stepz'",)),
    ],
    ids=str,
)
def test_those_that_could_serve_no_request_are_refused_at_start(defaults, fragments):
    with pytest.raises(ValueError) as error:
        EngineOptions.parse({"request_defaults": defaults})
    for fragment in fragments:
        assert fragment in str(error.value)


def test_an_engine_decodes_by_them(engines, tiny_llada):
    defaults = {"block_length": 8, "steps": 8, "unmasking": "random"}
    with_defaults = engines(tiny_llada, request_defaults=defaults)
    prompt = [3, 1, 4, 1, 5]
    params = {"gen_length": 16, "ignore_eos": True, "seed": 1}
    (asked,) = generate(engines(tiny_llada), [prompt], DiffusionParams(**params, **defaults))
    (by_default,) = generate(with_defaults, [prompt], DiffusionParams(**params))
    assert by_default.outputs[0].token_ids == asked.outputs[0].token_ids
    assert by_default.outputs[0].diffusion == asked.outputs[0].diffusion
    (overridden,) = generate(with_defaults, [prompt], DiffusionParams(**params, steps=4))
    assert overridden.outputs[0].diffusion.forward_passes == 4
