"""Weights that change while an engine lives, and the calls that trainers make around
it.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import (
    WeightTransferEngine,
    WeightTransferEngineFactory,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from dllm_engine import DiffusionParams
from dllm_engine.vllm_hooks import engine_core
from tests.support import tiny_checkpoints
from tests.support.engines import assert_nothing_left, scheduler_of, tokens_of

PROMPT = [3, 1, 4, 1, 5]
SETTINGS: dict[str, Any] = {"gen_length": 16, "block_length": 8, "ignore_eos": True}
STATED = {}
"""Tensors that a trainer sends, by the name of the message."""


class FromThisProcess(WeightTransferEngine):
    """What vLLM's engines for CUDA do, without CUDA: whole tensors by released names,
    layer by layer.
    """

    init_info_cls = update_info_cls = SimpleNamespace

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info):
        self.receive_weights(update_info)

    def receive_weights(self, update_info):
        with torch.device(self.device):
            self.model.load_weights(STATED[update_info["message"]].items())

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self):
        pass


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Another model of the same shapes, in a folder."""
    return tiny_checkpoints.write("llada", tmp_path_factory.mktemp("others"), seed=7)


@pytest.fixture(scope="module")
def trained(engines, tiny_llada):
    """An engine whose weights these tests change."""
    WeightTransferEngineFactory.register_engine("from_this_process", FromThisProcess)
    transfer = WeightTransferConfig(backend="from_this_process")
    llm = engines(tiny_llada, cache_method="dual", weight_transfer_config=transfer)
    llm.init_weight_transfer_engine({"init_info": {}})
    return llm


@pytest.fixture
def llm(trained, tiny_llada):
    """The same with the weights of ``tiny_llada``, and nothing running."""
    yield trained
    trained.wake_up(tags=["scheduling"])
    trained.llm_engine.abort_request(
        list(trained.llm_engine.output_processor.request_states), internal=True
    )
    reload(trained, tiny_llada)
    assert_nothing_left(trained)


@pytest.fixture(scope="module")
def answers(engines, tiny_llada, others):
    """To the prompt, by either set of weights."""
    return tuple(
        tokens_of(engines(model, cache_method="dual"), PROMPT, **SETTINGS)
        for model in (tiny_llada, others)
    )


def start_request(llm):
    """The outputs of its first step."""
    llm.llm_engine.add_request(
        "running", {"prompt_token_ids": PROMPT}, DiffusionParams(**SETTINGS)
    )
    return llm.llm_engine.step()


def finish_requests(llm):
    outputs = {}
    for _ in range(100):
        outputs |= {output.request_id: output for output in llm.llm_engine.step()}
    return {name: list(output.outputs[0].token_ids) for name, output in outputs.items()}


def error_of_request(llm):
    (output,) = start_request(llm)
    assert output.outputs[0].finish_reason == "error"
    return output.outputs[0].diffusion.error


def reload(llm, folder):
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def send(llm, message, tensors):
    STATED[message] = tensors
    llm.update_weights({"update_info": {"message": message}})


def test_weights_come_from_a_trainer_in_parts(llm, others, answers):
    llm.start_weight_update()
    names = sorted(tensors := load_file(others / "model.safetensors"))
    for number in range(3):
        send(llm, "part", {name: tensors[name] for name in names[number::3]})
    llm.finish_weight_update("step 7")
    assert llm.get_weight_version() == "step 7"
    assert tokens_of(llm, PROMPT, **SETTINGS) == answers[1]


def test_new_weights_read_no_pages_of_the_old_ones(engines, tiny_sdar, tmp_path):
    """Requests of a block diffusion model share pages of equal prompts."""
    prompt = [3, 17, 99, 4] * 12
    settings = {"cache_method": "block", "page_size": 4, "max_num_seqs": 2}
    changing = engines(tiny_sdar, **settings)
    other = tiny_checkpoints.write("sdar", tmp_path, seed=7)
    expected = [
        tokens_of(engines(model, **settings), prompt, gen_length=8)
        for model in (tiny_sdar, other)
    ]
    assert expected[0] != expected[1]
    reload(changing, other)
    try:
        assert tokens_of(changing, prompt, gen_length=8) == expected[1]
    finally:
        reload(changing, tiny_sdar)


@pytest.mark.parametrize(
    "call", ["reload_weights", "start_weight_update", "reset_weights"]
)
def test_nothing_changes_while_a_request_runs(llm, answers, call):
    start_request(llm)
    with pytest.raises(
        ValueError, match=rf"{call}: 1 requests are running.*mode='wait'"
    ):
        llm.collective_rpc(call)
    assert finish_requests(llm) == {"running": answers[0]}
    llm.collective_rpc("reload_weights")


def test_requests_wait_for_an_update_while_the_engine_is_paused(llm, others, answers):
    llm.sleep(level=0)
    start_request(llm)
    llm.start_weight_update()
    assert not scheduler_of(llm).running
    send(llm, "all", load_file(others / "model.safetensors"))
    llm.wake_up(tags=["scheduling"])
    llm.llm_engine.step()
    assert not scheduler_of(llm).running, "its weights are incomplete still"
    llm.finish_weight_update()
    assert finish_requests(llm) == {"running": answers[1]}


def test_weights_that_are_incomplete_answer_nothing(llm, tmp_path, tiny_llada, answers):
    llm.start_weight_update()
    assert "weights are incomplete since start_weight_update" in error_of_request(llm)
    llm.finish_weight_update()
    broken = tiny_checkpoints.write(
        "llada", tmp_path, edit=lambda t: t.pop("model.transformer.ln_f.weight")
    )
    with pytest.raises(ValueError, match="lacks 1 tensors"):
        reload(llm, broken)
    assert "weights are incomplete since reload_weights" in error_of_request(llm)
    reload(llm, tiny_llada)
    assert tokens_of(llm, PROMPT, **SETTINGS) == answers[0]


def test_a_folder_that_is_not_there_or_has_no_weights_changes_nothing(
    llm, tmp_path, answers
):
    for folder, message in (
        ("/nowhere", "does not exist"),
        (tmp_path, "holds no"),
    ):
        with pytest.raises(ValueError, match=message):
            reload(llm, folder)
    assert tokens_of(llm, PROMPT, **SETTINGS) == answers[0]


@pytest.mark.parametrize("call", ["reload_weights", "start_weight_update"])
def test_experts_are_not_read_again_on_a_cpu(engines, tiny_llada_moe, call):
    """vLLM would leave them unpacked, and the answers would be others."""
    with pytest.raises(NotImplementedError, match=rf"{call}: .* start a new engine"):
        engines(tiny_llada_moe).collective_rpc(call)


def test_a_frozen_request_goes_on_where_it_stopped_and_a_cpu_gives_no_memory_back(
    llm, answers
):
    start_request(llm)
    llm.sleep(level=0, mode="keep")
    assert llm.llm_engine.step() == []
    assert not scheduler_of(llm).schedule().plans
    for level in (1, 2):
        with pytest.raises(
            NotImplementedError, match=rf"sleep\(level={level}\): .* use level=0"
        ):
            llm.sleep(level)
    with pytest.raises(ValueError, match="reload_weights: 1 requests are running"):
        llm.collective_rpc("reload_weights")
    assert llm.reset_prefix_cache()
    llm.wake_up(tags=["scheduling"])
    assert finish_requests(llm) == {"running": answers[0]}


def test_steps_are_profiled(engines, tiny_llada, tmp_path_factory, answers):
    folder = tmp_path_factory.mktemp("profile")
    profiler = {"profiler": "torch", "torch_profiler_dir": str(folder)}
    llm = engines(tiny_llada, cache_method="dual", profiler_config=profiler)
    llm.start_profile("steps")
    assert tokens_of(llm, PROMPT, **SETTINGS) == answers[0]
    llm.stop_profile()
    assert list(folder.glob("*steps*"))
    assert tokens_of(llm, PROMPT, **SETTINGS) == answers[0]


@pytest.mark.parametrize("num_running", [0, 1])
def test_running_requests_keep_their_pages_on_a_gpu(monkeypatch, num_running):
    monkeypatch.setattr(
        engine_core, "current_platform", SimpleNamespace(is_cpu=lambda: False)
    )
    done = []
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(is_dllm_engine=True)),
        scheduler=SimpleNamespace(
            num_begun=num_running, reset_prefix_cache=lambda: done.append("reset")
        ),
    )
    calls = [
        lambda: engine_core.sleep_if_possible(
            lambda self, level, mode: done.append(mode), engine, 1, "keep"
        ),
        lambda: engine_core.release_if_unused(
            lambda self: done.append("released"), engine
        ),
    ]
    for call in calls:
        if num_running:
            with pytest.raises(
                ValueError,
                match="1 requests are running, and their pages would be lost",
            ):
                call()
        else:
            call()
    assert done == ([] if num_running else ["keep", "reset", "released"])
