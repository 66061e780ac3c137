"""Logits of the model classes as vLLM loads them, against the authors' and against a
plain implementation.
"""

import json
import shutil
from typing import Any

import pytest
import torch
import transformers

from dllm_engine.model_executor.passes.base import DensePass
from dllm_engine.model_executor.step_batch import RowBounds
from tests.oracles.models import PlainModel
from tests.support import tiny_checkpoints
from tests.support.engines import runner_of
from tests.support.reference_cases import reference_cases

FORWARD_CASES = {case["name"]: case for case in reference_cases("forward")}


@torch.inference_mode()
def dense_logits(
    llm,
    *sequences: list[int],
    block_length: int | None = None,
    lead: int = 0,
    causal_stop: int = 0,
) -> list[torch.Tensor]:
    """Raw logits ``[length, vocabulary]`` of sequences that share one forward pass, on
    the CPU. With ``block_length``, a row sees its own block and those before it; the
    first block lacks ``lead`` positions. Rows before ``causal_stop`` see none behind
    them."""
    model, device = runner_of(llm).model, runner_of(llm).device
    sizes = [len(sequence) for sequence in sequences]
    ids = torch.tensor(
        [token for sequence in sequences for token in sequence], device=device
    )
    positions = torch.cat(
        [torch.arange(len(sequence), device=device) for sequence in sequences]
    )
    limits = (
        None
        if block_length is None
        else ((positions + lead) // block_length + 1).int() * block_length - lead
    )
    if limits is not None:
        causal = (positions + 1).int()
        limits = torch.where(positions < causal_stop, causal, limits)
    shard = model.compute_logits(
        model(ids, positions, DensePass(RowBounds(sizes, ids.device, limits)))[0]
    )
    assert shard.first_token == 0
    return list(shard.logits.cpu().split(sizes))


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, relative: float = 1e-4
) -> None:
    """Each row within ``relative`` of its largest logit."""
    assert actual.shape == expected.shape
    error = (actual.float() - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert error.max() < relative


@pytest.mark.parametrize("name", FORWARD_CASES)
def test_logits_are_those_of_the_authors_code(engines, reference_checkpoints, name):
    case = FORWARD_CASES[name]
    llm = engines(reference_checkpoints / case["model"], max_model_len=256)
    (ids,) = case["input_ids"]
    length = case.get("block_length")
    lead = length - case["first_block_length"] if "first_block_length" in case else 0
    context = case.get("context_length", 0)
    if context:
        length = len(ids)
    (logits,) = dense_logits(
        llm, ids, block_length=length, lead=lead, causal_stop=context
    )
    assert_close(logits[case["full_logits_rows"]], torch.tensor(case["full_logits"]))
    top = logits.topk(8)
    assert_close(top.values, torch.tensor(case["top8_logits"]))
    assert_close(
        logits.gather(1, torch.tensor(case["top8_ids"])),
        torch.tensor(case["top8_logits"]),
    )
    assert_close(
        logits.logsumexp(-1, keepdim=True), torch.tensor(case["logsumexp"])[:, None]
    )


LAYOUTS: dict[str, Any] = {
    "llada grouped queries": {"n_kv_heads": 2},
    "llada tied": {"weight_tying": True},
    "llada qkv bias": {"include_qkv_bias": True},
    "llada larger embedding": {"embedding_size": 192},
    "llada large eps, small theta": {"rms_norm_eps": 0.1, "rope_theta": 100.0},
    "llada_moe dense layer, shared expert, bias": tiny_checkpoints.ALL_KINDS_OF_EXPERTS,
    "llada_moe without norms of heads": {"qk_layernorm": False},
    "llada_moe one expert of each row, of odd width": {
        "num_experts_per_tok": 1,
        "expert_intermediate_size": 37,
    },
    "sdar tied, one KV head": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "sdar_moe one expert of each row, of odd width, weights as they are": {
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 37,
        "norm_topk_prob": False,
    },
    "llada2 one expert, no bias, no shared one, no dense layer": {
        "num_experts_per_tok": 1,
        "moe_router_enable_expert_bias": False,
        "num_shared_experts": 0,
        "first_k_dense_replace": 0,
        "use_qk_norm": False,
        "partial_rotary_factor": 1.0,
    },
    "llada2 experts by block": {"expert_capacity": 3, "block_size": 8},
    "dream tied": {"tie_word_embeddings": True},
    "a2d": {},
    "open_dcoder": {},
}
"""Keys of configs; a name begins with that of the family."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("files", [1, 3])
def test_logits_of_other_layouts_are_those_of_a_plain_version(
    engines, tmp_path, layout, files
):
    folder = tiny_checkpoints.write(
        layout.split()[0], tmp_path / "model", seed=3, **LAYOUTS[layout]
    )
    plain = PlainModel(folder)
    if files > 1:
        tiny_checkpoints.shard(folder, files)
    ids = torch.randint(
        0,
        tiny_checkpoints.VOCAB_SIZE,
        (40,),
        generator=torch.Generator().manual_seed(1),
    ).tolist()
    assert_close(
        dense_logits(engines(folder), ids, block_length=plain.block_length)[0],
        plain.logits(ids),
    )


QWEN3_MOE = ("qwen3_moe", "Qwen3MoeForCausalLM")
SAME_IN_TRANSFORMERS: dict[str, Any] = {
    "sdar_moe": (*QWEN3_MOE, {}),
    "sdar_moe plain": (
        *QWEN3_MOE,
        {
            "norm_topk_prob": False,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
    ),
    "sdar_moe dense": (
        *QWEN3_MOE,
        {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "block_size": 8,
        },
    ),
    "illada": ("llama", "LlamaForCausalLM", {}),
    "dream_reasoner": ("qwen3", "Qwen3ForCausalLM", {}),
    "stable_diffcoder": ("llama", "LlamaForCausalLM", {}),
}
"""Models of transformers with the same blocks; where attention goes by blocks, their
mask says so.
"""


@pytest.mark.parametrize("name", SAME_IN_TRANSFORMERS)
@torch.inference_mode()
def test_logits_are_those_of_transformers_models_with_the_same_blocks(
    engines, tmp_path, name
):
    model_type, architecture, config = SAME_IN_TRANSFORMERS[name]
    folder = tiny_checkpoints.write(
        name.split()[0], tmp_path / "model", seed=3, **config
    )
    stated = json.loads((folder / "config.json").read_text())
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    renamed = stated | {"model_type": model_type, "architectures": [architecture]}
    (theirs / "config.json").write_text(json.dumps(renamed))
    model, report = getattr(transformers, architecture).from_pretrained(
        theirs,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    ids = torch.randint(
        0,
        tiny_checkpoints.VOCAB_SIZE,
        (42,),
        generator=torch.Generator().manual_seed(1),
    )
    block_length = stated.get("block_size")
    blocks = torch.arange(42) // (block_length or 42)
    behind = torch.zeros(42, 42).masked_fill(blocks > blocks[:, None], -torch.inf)
    expected = model(ids[None], attention_mask=behind[None, None]).logits[0]
    assert_close(
        dense_logits(engines(folder), ids.tolist(), block_length=block_length)[0],
        expected,
    )


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("served", ["float32", "bfloat16", "float16"])
def test_each_dtype_loads_and_keeps_its_precision(engines, tmp_path, stored, served):
    folder = tiny_checkpoints.write("llada", tmp_path / "model", torch_dtype=stored)
    llm = engines(folder, dtype=served)
    ids = list(range(1, 30))
    relative = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.02}[served]
    assert runner_of(llm).model.embedding.weight.dtype == getattr(torch, served)
    assert_close(dense_logits(llm, ids)[0], PlainModel(folder).logits(ids), relative)
