"""``demo-blocks``: a trained model whose attention goes by blocks, and the training that makes it."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from dllm_engine import DiffusionParams
from dllm_engine.demo import DEMO_BLOCKS, DEMO_BLOCKS_DIR
from dllm_engine.demo.tasks import TASKS, make_examples
from scripts.train_demo.recipes import RECIPES

MAX_BYTES = 4 * 1024 * 1024
PER_TASK = 4
SEED = 100
"""Far below the training seeds; the figures in docs/evaluation.md come from other ones."""


@pytest.fixture(scope="module")
def answers(engines):
    """``answers(method, threshold)``: the completions of the same examples of every task, in their order."""
    examples = [example for task in TASKS for example in make_examples(task, PER_TASK, SEED)]
    chats = [[{"role": "user", "content": example.prompt}] for example in examples]

    def complete(method, threshold):
        llm = engines(DEMO_BLOCKS, cache_method=method, skip_tokenizer_init=False, max_model_len=512)
        outputs = llm.chat(chats, DiffusionParams(threshold=threshold), use_tqdm=False)
        return examples, [output.outputs[0] for output in outputs]

    return complete


@pytest.mark.parametrize("threshold", [None, 0.9])
def test_it_answers_right_and_its_cache_changes_no_token_and_a_threshold_takes_fewer_passes(answers, threshold):
    examples, cached = answers("block", threshold)
    _, plain = answers("none", threshold)
    assert [list(each.token_ids) for each in cached] == [list(each.token_ids) for each in plain]
    right = sum(each.text.strip() == example.answer for each, example in zip(cached, examples, strict=True))
    assert right >= 0.9 * len(examples)
    assert {each.finish_reason for each in cached} == {"stop"}, "an end token ends every answer"
    if threshold:
        single = answers("block", None)[1]
        assert sum(c.diffusion.forward_passes for c in cached) < sum(s.diffusion.forward_passes for s in single)


def test_its_training_runs_and_writes_its_tensors(tmp_path):
    assert sum(file.stat().st_size for file in DEMO_BLOCKS_DIR.iterdir()) <= MAX_BYTES
    replace(RECIPES["blocks"], steps=2).run(tmp_path)
    files = {file.name for file in DEMO_BLOCKS_DIR.iterdir()} - {"README.md"}
    assert {file.name for file in tmp_path.iterdir()} == files
    trained, shipped = (load_file(folder / "model.safetensors") for folder in (tmp_path, DEMO_BLOCKS_DIR))
    shapes = [{name: (t.shape, t.dtype) for name, t in tensors.items()} for tensors in (trained, shipped)]
    assert shapes[0] == shapes[1]
    assert any(not torch.equal(tensor, shipped[name]) for name, tensor in trained.items())
