"""Logits are made for the masked positions of the current block, a bounded number at a time."""

import json

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dllm_engine import DiffusionParams
from tests.support.engines import assert_nothing_left
from tests.support.tiny_checkpoints import LLADA_CONFIG

VOCAB_SIZE = 126_464
CANVAS = 2048
BLOCK_LENGTH = 32


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest floating-point tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        # Views of the weights are not made by the step.
        if not func.is_view:
            made = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            self.numel = max([self.numel, *made])
        return out


def test_a_step_never_holds_logits_of_the_canvas(engines, tmp_path):
    vocabulary = {"vocab_size": VOCAB_SIZE, "embedding_size": VOCAB_SIZE, "mask_token_id": 1, "eos_token_id": 2}
    config = LLADA_CONFIG | vocabulary | {"max_sequence_length": CANVAS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = engines(tmp_path, load_format="dummy", max_model_len=CANVAS)
    params = DiffusionParams(gen_length=CANVAS // 2, block_length=BLOCK_LENGTH, ignore_eos=True)
    llm.llm_engine.add_request("one", {"prompt_token_ids": [5] * (CANVAS // 2)}, params)
    with LargestTensor() as largest:
        llm.llm_engine.step()
    assert largest.numel <= BLOCK_LENGTH * VOCAB_SIZE
    llm.llm_engine.abort_request(["one"])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert_nothing_left(llm)
