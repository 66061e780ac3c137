"""Defaults of requests from ``generation_config.json`` and ``override_generation_config``."""

import json

import pytest
from transformers import GenerationConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from dllm_engine.admission import unsupported
from dllm_engine.plugin import register
from dllm_engine.vllm_hooks import engine_config
from dllm_engine.vllm_hooks.generation_config import left_out_generation
from tests.support.engines import start_engine
from tests.support.http_app import served
from tests.support.tiny_checkpoints import write_llada

QWEN = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05}
USED = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
LEFT_OUT = {"repetition_penalty": 1.05, "presence_penalty": 1, "frequency_penalty": 0.5, "min_p": 0.05}
NOT_SUPPORTED = "not supported for diffusion models, and left out"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llada(tmp_path_factory.mktemp("generation"))


@pytest.fixture
def configured(folder):
    """The model's config in vLLM with a ``generation_config.json`` of this content."""

    def configure(content, **settings):
        register()
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / "generation_config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        return EngineArgs(str(folder), skip_tokenizer_init=True, **settings).create_model_config()

    return configure


def check(model_config):
    """That requests with the engine's defaults are served."""
    for name, value in model_config.get_diff_sampling_param().items():
        assert unsupported(name, value) is None


@pytest.mark.parametrize(("name", "value"), LEFT_OUT.items())
def test_what_a_file_brings_and_is_not_supported_is_left_out_and_named(configured, name, value):
    model_config = configured(USED | {name: value})
    check(model_config)
    assert left_out_generation(model_config).endswith(f"_config.json: {NOT_SUPPORTED}: {name}={value!r}")
    assert model_config.get_diff_sampling_param() == USED | {"max_tokens": 256}
    assert left_out_generation(configured(USED | {name: value}, generation_config="vllm")) is None


def test_what_is_used_or_off_is_not_named(configured):
    neutral = GenerationConfig._get_default_generation_params() | GenerationConfig().to_dict()
    neutral |= {"do_sample": True, "repetition_penalty": 1.0, "min_p": 0.0}
    model_config = configured(neutral | USED | {"presence_penalty": 0, "eos_token_id": [1, 2]})
    check(model_config)
    assert left_out_generation(model_config) is None
    assert model_config.get_diff_sampling_param() == USED | {"max_tokens": 256}


@pytest.mark.parametrize("content", [b"[1]", b'"text"', b"7", b"null ", b"", b"{", b'{"top_k": \xff}'], ids=repr)
def test_a_file_that_is_no_json_object_is_refused_by_name(configured, content):
    for settings in ({}, {"generation_config": "vllm"}):
        with pytest.raises(ValueError, match=r"generation_config\.json( is not JSON| holds a|: .*mapping)"):
            configured(content, **settings)


WRONG = {
    "temperature": ("0.7", -1, 1e308, [0.7]),
    "top_p": (0, "most"),
    "top_k": (1.5, 10**30),
    "max_new_tokens": (0, True),
    "eos_token_id": ("x", [1, None]),
    "early_stopping": (7,),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_with_the_file(configured, name):
    for value in WRONG[name]:
        with pytest.raises(ValueError, match=rf"generation_config\.json: .*{name}"):
            configured({name: value})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"repetition_penalty": 1.05}, "repetition_penalty=1.05: penalties are not supported"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"presence_penalty": 1}, "presence_penalty=1"),
        ({"temprature": 0.5}, r"takes no 'temprature'.*'?temperature"),
        ({"eos_token_id": 7}, "takes no 'eos_token_id'"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"top_p": 2.0}, "top_p=2.0"),
    ],
    ids=str,
)
def test_an_override_that_is_not_supported_is_refused_by_name(configured, override, message):
    with pytest.raises(ValueError, match=f"override_generation_config.*{message}"):
        configured({}, override_generation_config=override)


def test_an_override_of_neutral_values_is_none(configured):
    override = {"repetition_penalty": 1.0, "min_p": 0.0, "frequency_penalty": 0, "temperature": None, "top_p": 0.9}
    model_config = configured(USED, override_generation_config=override)
    assert model_config.get_diff_sampling_param() == USED | {"top_p": 0.9, "max_tokens": 256}


def test_an_engine_of_such_a_file_answers_and_says_once_what_it_leaves_out(folder, monkeypatch):
    (folder / "generation_config.json").write_text(json.dumps(QWEN))
    warnings = []
    monkeypatch.setattr(engine_config.logger, "warning", lambda text, *given: warnings.append(text % given))
    llm = start_engine(folder)
    (warning,) = [text for text in warnings if "left out" in text]
    assert "repetition_penalty=1.05, min_p=0.05" in warning
    prompt = {"prompt_token_ids": [3, 1, 4]}
    for params in (None, SamplingParams(max_tokens=4), llm.get_default_sampling_params()):
        assert llm.generate(prompt, params)
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.05"):
        llm.generate(prompt, SamplingParams(repetition_penalty=1.05))
    body = {"model": str(folder), "prompt": [3, 1, 4], "max_tokens": 4}
    ask = served(llm).post
    assert ask("/v1/completions", json=body).status_code == 200
    refused = ask("/v1/completions", json=body | {"repetition_penalty": 1.05})
    assert refused.status_code == 400
    assert "repetition_penalty=1.05" in refused.json()["error"]["message"]
