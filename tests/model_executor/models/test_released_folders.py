"""Folders of the smaller models as the Hub has them: each starts with its own defaults,
takes the memory that is planned, and answers a chat.
"""

import re
from pathlib import Path

import pytest
from pydantic import ByteSize

from dllm_engine import DiffusionParams
from dllm_engine.checkpoints import check_start
from dllm_engine.memory import Deployment, plan
from dllm_engine.model_executor.loading.files import check_safetensors
from dllm_engine.options import EngineOptions
from tests.support.preloaded import Program, wait_until
from tests.support.released_checkpoints import FOLDERS, RELEASED, write

CHAT = [{"role": "user", "content": "Where is the sea?"}]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return lambda name: write(name, tmp_path_factory.mktemp("hub"))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_planned_loaded_and_answers(engines, folder_of, name):
    folder = str(folder_of(name))
    check_start(folder, {})
    llm = engines(folder, dtype="auto", skip_tokenizer_init=False)
    config = llm.model_config.hf_config
    assert name in config.family.checkpoints
    assert config.mask_token_id == RELEASED[name]["mask_token_id"]
    tensors = check_safetensors(folder)
    if RELEASED[name].get("stores_tied_head"):
        tensors.pop("lm_head.weight")
    numbers = sum(tensor.size for tensor in tensors.values())
    sizing = plan(Deployment(model=folder, options=EngineOptions(cache_method="auto")))
    assert sizing.weight_bytes == 2 * numbers
    params = DiffusionParams(gen_length=40, ignore_eos=True)
    (output,) = llm.chat(CHAT, params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    assert len(tokens) == 40
    assert config.mask_token_id not in tokens


SMALLEST = "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1"
PROGRAM = """
import sys
from dllm_engine import LLM, DiffusionParams

llm = LLM(sys.argv[1], cache_method="dual", max_model_len=512)
params = DiffusionParams(gen_length=16, block_length=8, ignore_eos=True)
(output,) = llm.chat([{"role": "user", "content": "Where is the sea?"}], params)
assert len(output.outputs[0].token_ids) == 16
"""


def own_bytes(pid: int) -> int:
    """Memory that a process has for itself: not the files that it has mapped."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(
        int(number) << 10
        for number in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.MULTILINE)
    )


@pytest.mark.slow
def test_the_smallest_answers_within_the_memory_that_is_planned(tmp_path):
    """In a process of its own, whose memory is measured."""
    folder = write(SMALLEST, tmp_path, is_narrow=False)
    (tmp_path / "answer.py").write_text(PROGRAM)
    with (tmp_path / "log").open("w") as log:
        program = Program([tmp_path / "answer.py", folder], stdout=log, stderr=log)
    most = 0

    def has_ended() -> bool:
        nonlocal most
        if program.poll() is None:
            most = max(most, own_bytes(program.pid))
        return program.poll() is not None

    wait_until(has_ended, 600)
    assert program.returncode == 0, (tmp_path / "log").read_text()
    options = EngineOptions(cache_method="dual")
    one_process = ByteSize(1 << 30)
    sizing = plan(Deployment(model=str(folder), options=options, overhead=one_process))
    assert sizing.weight_bytes + sizing.pool_bytes < most < sizing.num_bytes
