"""What is refused before vLLM starts: unknown arguments, models of another kind, what is not installed."""

import sys

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs

from dllm_engine.checkpoints import check_start
from dllm_engine.cli.main import main
from dllm_engine.demo import DEMO_GUIDE_DIR
from tests.support.engines import start_engine

LLAMA = str(DEMO_GUIDE_DIR)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_metod": "sparse"}, "unknown argument 'cache_metod'; did you mean 'cache_method'?"),
        ({"max_model_length": 64}, "unknown argument 'max_model_length'; did you mean 'max_model_len'?"),
        ({"zzzzzz": 1}, "unknown argument 'zzzzzz'"),
        ({"cache_method": "sparse", "cache_options": {"retention": 1}}, "did you mean 'retention_ratio'?"),
        ({"request_defaults": {"treshold": 0.9}}, "takes no 'treshold'; did you mean 'threshold'?"),
        ({"additional_config": {"dllm": {"trace": True}}}, "LLM takes engine options as arguments of its own"),
        ({"guide_model": "/no/such/folder"}, "guide_model='/no/such/folder' cannot be loaded"),
        ({"cache_method": "best"}, "cache_method='best': unknown cache method; choose one of auto, none"),
        ({"trace": "often"}, "trace='often'"),
        ({"max_automaton_states": 0}, "max_automaton_states=0: Input should be greater than or equal to 1"),
        ({"max_automaton_seconds": 0}, "max_automaton_seconds=0: Input should be greater than 0"),
        ({"lora_path": "/nowhere"}, "lora_path='/nowhere' is no folder; download the adapter and name its folder"),
    ],
    ids=str,
)
def test_an_argument_that_means_nothing_is_refused(tiny_llada, settings, message):
    with pytest.raises(ValueError) as caught:
        start_engine(tiny_llada, **settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# Models of another kind


UNSUPPORTED = r"of architecture LlamaForCausalLM: .*supported: LLaDAModelLM \(LLaDA\), .*DreamModel \(Dream\)"


def test_a_llama_is_refused_by_llm():
    with pytest.raises(ValueError, match=UNSUPPORTED):
        start_engine(LLAMA, cache_method="sparse")


def test_our_options_for_a_llama_are_refused_by_stock_vllm():
    with pytest.raises(ValueError, match=UNSUPPORTED):
        vllm.LLM(LLAMA, additional_config={"dllm": {"cache_method": "sparse"}}, max_model_len=64)


def test_stock_vllm_takes_a_llama_without_our_options():
    config = EngineArgs(LLAMA, max_model_len=64, additional_config={"other": 1}).create_engine_config()
    assert config.model_config.architecture == "LlamaForCausalLM"
    assert config.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize("argv", [["generate", "Hello!", "--model", LLAMA], ["serve", LLAMA, "--port", "1"]], ids=str)
def test_a_llama_is_refused_by_the_command_line(argv, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "architecture LlamaForCausalLM" in error
    assert error.count("\n") == 1


def test_a_folder_that_does_not_exist_is_named(capsys):
    with pytest.raises(ValueError, match=r"^model folder /no/such/folder does not exist$"):
        start_engine("/no/such/folder")
    assert main(["serve", "/no/such/folder"]) == 2
    assert capsys.readouterr().err == "dllm: error: model folder /no/such/folder does not exist\n"


def test_a_missing_ray_is_named_with_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"Ray is not installed; run pip install 'dllm-engine\[ray\]'"):
        check_start("demo", {"distributed_executor_backend": "ray"})
    assert main(["serve", "demo", "--distributed-executor-backend=ray"]) == 2
    assert main(["serve", "demo", "--data-parallel-backend", "ray"]) == 2
    assert capsys.readouterr().err.count("pip install 'dllm-engine[ray]'") == 2
