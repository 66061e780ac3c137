"""What is refused before vLLM starts: unknown arguments, models of another kind, what is not installed or of no use."""

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs

from dllm_engine import DiffusionParams
from dllm_engine.demo import DEMO_GUIDE_DIR
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from tests.support.engines import generate, start_engine

LLAMA = str(DEMO_GUIDE_DIR)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_metod": "sparse"}, "unknown argument 'cache_metod'; did you mean 'cache_method'?"),
        ({"cache_method": "sparse", "cache_options": {"retention": 1}}, "did you mean 'retention_ratio'?"),
        ({"request_defaults": {"treshold": 0.9}}, "takes no 'treshold'; did you mean 'threshold'?"),
        ({"additional_config": {"dllm": {"trace": True}}}, "LLM takes engine options as arguments of its own"),
        ({"model": "/no/such/folder"}, "model folder /no/such/folder does not exist"),
        ({"guide_model": "/no/such/folder"}, "guide_model='/no/such/folder' cannot be loaded"),
        ({"cache_method": "best"}, "cache_method='best': unknown cache method; choose one of auto, none"),
        ({"trace": "often"}, "trace='often'"),
        ({"max_automaton_seconds": 1e308}, "max_automaton_seconds=1e+308: Input should be less than or equal to 86400"),
        ({"lora_path": "/nowhere"}, "lora_path='/nowhere' is no folder; download the adapter and name its folder"),
    ],
    ids=str,
)
def test_an_argument_that_means_nothing_is_refused(tiny_llada, settings, message):
    with pytest.raises(ValueError) as caught:
        start_engine(**({"model": tiny_llada} | settings))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


UNSUPPORTED = r"of architecture LlamaForCausalLM: .*supported: LLaDAModelLM \(LLaDA\), .*DreamModel \(Dream\)"


def test_a_llama_is_refused_with_our_options():
    with pytest.raises(ValueError, match=UNSUPPORTED):
        start_engine(LLAMA, cache_method="sparse")
    with pytest.raises(ValueError, match=UNSUPPORTED):
        vllm.LLM(LLAMA, additional_config={"dllm": {"cache_method": "sparse"}}, max_model_len=64)


def test_stock_vllm_takes_a_llama_without_our_options():
    config = EngineArgs(LLAMA, max_model_len=64, additional_config={"other": 1}).create_engine_config()
    assert config.model_config.architecture == "LlamaForCausalLM"
    assert config.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize("cache_method", ["block", "none"])
@pytest.mark.parametrize(
    "settings", [{"dense_attention": "flash"}, {"dense_attention": "sdpa"}, {"guide_model": "demo"}], ids=str
)
def test_what_attention_by_blocks_has_no_use_for_is_refused(tiny_sdar, cache_method, settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"^{name}=.*: attention of SDAR goes by blocks, .* leave {name} unset"):
        start_engine(tiny_sdar, cache_method=cache_method, **settings)


def test_a_block_that_no_step_has_room_for_is_refused_when_it_is_asked_for(engines, tiny_llada2):
    """An engine has room for a block of its own, however few rows it is given."""
    llm = engines(tiny_llada2, max_num_batched_tokens=4, max_num_seqs=4)
    asked = {"gen_length": 8, "ignore_eos": True}
    with pytest.raises(InvalidRequestError, match=r"^block_length=9: .* max_num_batched_tokens=8 rows; lower"):
        generate(llm, [[5, 6, 7]], DiffusionParams(block_length=9, **asked))
    (output,) = generate(llm, [[*range(30)]], DiffusionParams(**asked))
    assert len(output.outputs[0].token_ids) == 8
