"""What vLLM's workers use of a model runner: ours has it, or its worker never gets
there.
"""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu_worker import Worker

from dllm_engine import DiffusionParams
from dllm_engine.model_executor.workers.gpu import DiffusionGPUWorker
from tests.support.engines import generate, runner_of

OURS = (
    "_dummy_run",
    "_dummy_pooler_run",
    "_dummy_sampler_run",
    "capture_model",
    "lora_config",
    "eplb",
    "maybe_remove_all_loras",
    "needs_cudagraph_capture",
    "warming_up_model",
)
NEVER_USED = dict.fromkeys(OURS, "only in methods that DiffusionWorker replaces") | {
    "_init_kv_zero_meta": "only if the runner has it",
    "pool": "for pooling models",
    "profile_cudagraph_memory": "for graphs that vLLM records; ours are off for it",
    "sample_tokens": "execute_model returns the tokens",
    "take_draft_token_ids": "for speculative decoding",
}


def used_of_a_runner(module: str):
    """Reads the file alone: importing vLLM's CPU worker takes CUDA streams from the
    process.
    """
    source = Path(find_spec(f"vllm.v1.worker.{module}").origin).read_text(
        encoding="utf-8"
    )
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("self.model_runner", "model_runner")
    }


def test_every_attribute_that_vllms_workers_use_is_there_or_listed(engines, tiny_llada):
    runner = runner_of(engines(tiny_llada))
    used = used_of_a_runner("gpu_worker") | used_of_a_runner("cpu_worker")
    assert not {name for name in used if not hasattr(runner, name)} - set(NEVER_USED)


def test_nothing_refers_to_a_gpu_worker_that_has_ended(monkeypatch):
    workspace.init_workspace_manager(torch.device("cpu"))
    monkeypatch.setattr(Worker, "shutdown", lambda self: None)
    DiffusionGPUWorker.shutdown(DiffusionGPUWorker.__new__(DiffusionGPUWorker))
    assert not workspace.is_workspace_manager_initialized()


def test_weights_are_read_again_after_they_were_discarded(engines):
    """As by ``sleep(level=2)``, which vLLM has for GPUs only."""
    llm = engines(
        "demo",
        cache_method="freecache",
        guide_model="demo",
        kv_cache_memory_bytes=32 << 20,
    )
    params = DiffusionParams(gen_length=16, block_length=8, ignore_eos=True)

    def answer():
        output = generate(llm, [[5, 6, 7, 8]], params)[0].outputs[0]
        return output.token_ids, output.diffusion.unmasked_per_step

    before = answer()
    for model in (runner_of(llm).model, runner_of(llm).rank.guide.model):
        for parameter in model.parameters():
            parameter.data.zero_()
    assert answer() != before
    llm.collective_rpc("reload_weights")
    assert answer() == before


def test_what_cannot_be_done_is_refused_by_name(engines, tiny_llada):
    llm = engines(tiny_llada)
    with pytest.raises(NotImplementedError, match="name its folder as lora_path"):
        llm.collective_rpc("add_lora", args=(None,))
    assert llm.collective_rpc("get_draft_model") == [None]


LATE = """
import multiprocessing, os, time
from dllm_engine.model_executor.workers.parent import end_vllm_process_with_parent

def late(parent):
    while os.getppid() == parent:
        time.sleep(0.01)
    end_vllm_process_with_parent()
    time.sleep(120)

multiprocessing.get_context("fork").Process(target=late, args=(os.getpid(),), name="VllmWorker-1").start()
os._exit(0)
"""


def test_a_worker_ends_whose_engine_was_gone_before_it_looked():
    # Whoever has the pipe, the worker among them, keeps it open.
    subprocess.run(
        [sys.executable, "-c", LATE], stdout=subprocess.PIPE, timeout=60, check=True
    )


ENDING = """
import atexit, gc, multiprocessing
from dllm_engine.model_executor.workers.parent import end_vllm_process_with_parent

multiprocessing.current_process().name = "EngineCore"
atexit.register(lambda: print(gc.get_freeze_count() > 0))
end_vllm_process_with_parent()
"""


def test_a_process_of_an_engine_ends_without_a_search_for_garbage():
    command = [sys.executable, "-c", ENDING]
    assert subprocess.check_output(command, text=True) == "True\n"
