"""Defaults of requests from ``generation_config.json`` and ``override_generation_config``."""

import json

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from dllm_engine.plugin import register
from dllm_engine.vllm_hooks import engine_config
from dllm_engine.vllm_hooks.engine_config import left_out_defaults
from tests.support.engines import start_engine
from tests.support.http_app import refusal, served
from tests.support.tiny_checkpoints import write_llada

QWEN = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05}
USED = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llada(tmp_path_factory.mktemp("generation"))


@pytest.fixture
def configured(folder):
    def configure(content, **settings):
        register()
        (folder / "generation_config.json").write_text(json.dumps(content))
        return EngineArgs(str(folder), skip_tokenizer_init=True, **settings).create_model_config()

    return configure


@pytest.mark.parametrize(("name", "value"), [("repetition_penalty", 1.05), ("presence_penalty", 1), ("min_p", 0.05)])
def test_what_a_file_brings_and_is_not_supported_is_left_out_and_named(configured, name, value):
    model_config = configured(USED | {name: value})
    assert left_out_defaults(model_config) == [f"{name}={value!r}"]
    assert model_config.get_diff_sampling_param() == USED | {"max_tokens": 256}
    assert left_out_defaults(configured(USED | {name: value}, generation_config="vllm")) == []


def test_what_is_used_or_off_is_not_named(configured):
    model_config = configured(USED | {"repetition_penalty": 1.0, "min_p": 0.0, "eos_token_id": [1, 2]})
    assert left_out_defaults(model_config) == []
    assert model_config.get_diff_sampling_param() == USED | {"max_tokens": 256}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"repetition_penalty": 1.05}, "repetition_penalty=1.05: penalties are not supported"),
        ({"temprature": 0.5}, r"takes no 'temprature'.*'?temperature"),
        ({"eos_token_id": 7}, "takes no 'eos_token_id'"),
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
    body = {"model": str(folder), "prompt": [3, 1, 4], "max_tokens": 4}
    ask = served(llm).post
    assert ask("/v1/completions", json=body).status_code == 200
    refused = ask("/v1/completions", json=body | {"repetition_penalty": 1.05})
    assert "repetition_penalty=1.05" in refusal(refused)
