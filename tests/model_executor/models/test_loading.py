"""What a checkpoint's folder may hold, and how what it must not hold is refused."""

import json
import shutil
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

from dllm_engine import DiffusionParams
from dllm_engine.checkpoints import load_config
from dllm_engine.demo import model_path
from dllm_engine.model_executor.guide.sizes import guide_config
from dllm_engine.model_executor.models.configs import CONFIG_CLASSES
from tests.support import tiny_checkpoints
from tests.support.engines import refuse_start, start_engine, tokens_of

PROMPT = [11, 12, 13, 14]
BLOCK_0 = "model.transformer.blocks.0."


@pytest.mark.parametrize(
    ("family", "key", "embedding", "head"),
    [
        (
            "llada",
            "weight_tying",
            "model.transformer.wte.weight",
            "model.transformer.ff_out.weight",
        ),
        ("a2d", "tie_word_embeddings", "model.embed_tokens.weight", "lm_head.weight"),
    ],
)
def test_tied_checkpoint_may_carry_a_redundant_head(
    engines, tmp_path, family, key, embedding, head
):
    def add_head(tensors):
        tensors[head] = tensors[embedding].clone()

    def add_other_head(tensors):
        add_head(tensors)
        tensors[head][3] += 1

    def written(name, edit=None, **config):
        return tiny_checkpoints.write(family, tmp_path / name, edit=edit, **config)

    plain = written("plain", **{key: True})
    redundant = written("redundant", add_head, **{key: True})
    settings = {"gen_length": 16, "block_length": 8, "ignore_eos": True}
    assert tokens_of(engines(redundant), PROMPT, **settings) == tokens_of(
        engines(plain), PROMPT, **settings
    )
    other = written("other", add_other_head, **{key: True})
    with pytest.raises(ValueError, match=f"{head} differs from {embedding}"):
        engines(other)
    engines(other, hf_overrides={"tie_word_embeddings": False})


EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
UNKNOWN = f"{BLOCK_0}gate_of_the_future.weight"
PARTS = ("q_proj", "v_proj", "attn_out", "ff_proj", "ff_out", "attn_norm")


@pytest.mark.parametrize(
    ("family", "missing", "fragment"),
    [
        ("llada", BLOCK_0 + "attn_out.weight", "layers.0.out_proj"),
        ("llada", BLOCK_0 + "k_proj.weight", "layers.0.qkv_proj.weight[k]"),
        ("llada", BLOCK_0 + "up_proj.weight", "layers.0.mlp.gate_up_proj.weight[1]"),
        ("llada", "model.transformer.ln_f.weight", "final_norm"),
        ("dream", "model.layers.1.self_attn.v_proj.bias", "layers.1.qkv_proj.bias[v]"),
        (
            "llada_moe",
            EXPERT,
            "layers.1.mlp.experts.routed_experts.w2_weight[('w2', 3)]",
        ),
        ("llada_moe", "model.layers.1.mlp.expert_bias", "layers.1.mlp.expert_bias"),
        (
            "llada_moe",
            "model.layers.1.shared_expert.up_proj.weight",
            "shared_expert.gate_up_proj.weight[1]",
        ),
    ],
)
def test_missing_tensor_is_named(tmp_path, family, missing, fragment):
    kinds = tiny_checkpoints.ALL_KINDS_OF_EXPERTS if family == "llada_moe" else {}
    folder = tiny_checkpoints.write(
        family, tmp_path, edit=lambda tensors: tensors.pop(missing), **kinds
    )
    refuse_start(folder, fragment, "lacks 1 tensor")


@pytest.mark.parametrize(
    ("name", "edited"),
    [
        (UNKNOWN, lambda _: torch.zeros(3)),
        *[(f"{BLOCK_0}{part}.weight", lambda tensor: tensor[:-2]) for part in PARTS],
    ],
)
def test_unknown_and_misshapen_tensors_are_named(tmp_path, name, edited):
    edit = lambda tensors: tensors.update({name: edited(tensors.get(name))})  # noqa: E731
    folder = tiny_checkpoints.write("llada", tmp_path, edit=edit)
    refuse_start(folder, f"{folder}/model.safetensors: checkpoint tensor", name)


def test_a_misshapen_expert_is_named(tmp_path):
    def halve(tensors):
        name = next(name for name in tensors if "experts.0.gate_proj" in name)
        tensors[name] = tensors[name][:, ::2].contiguous()

    refuse_start(
        tiny_checkpoints.write("llada2", tmp_path, edit=halve),
        "experts.0.gate_proj.weight' has the shape",
    )


def shorten(file, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:-num_bytes])


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", lambda file: shorten(file, 1000)),
        ("model.safetensors", lambda file: file.write_text("<html>not found</html>")),
        ("model.safetensors", lambda file: file.unlink()),
        ("model-00003-of-00003.safetensors", lambda file: shorten(file, 100)),
        ("model-00002-of-00003.safetensors", lambda file: file.unlink()),
    ],
    ids=["truncated", "no safetensors", "missing", "truncated shard", "missing shard"],
)
def test_file_that_cannot_be_read_is_named(tmp_path, file, damage):
    folder = tiny_checkpoints.write("llada", tmp_path)
    if file != "model.safetensors":
        tiny_checkpoints.shard(folder)
    damage(folder / file)
    refuse_start(
        folder, str(folder), "safetensors" if file == "model.safetensors" else file
    )


LLADA, LLADA_MOE, DREAM = (
    CONFIG_CLASSES[name] for name in ("LLaDAModelLM", "LLaDAMoEModelLM", "DreamModel")
)


def test_released_vocabulary_knows_its_end_of_turn():
    assert (LLADA_MOE().mask_token_id, LLADA_MOE().eos_token_id) == (156_895, 156_892)
    assert LLADA_MOE(vocab_size=150).mask_token_id is None
    assert LLADA().end_of_turn_token_id == 126_348
    assert LLADA(vocab_size=150).end_of_turn_token_id is None
    assert DREAM().end_of_turn_token_id == 151_645
    assert DREAM(vocab_size=150, end_of_turn_token_id=7).end_of_turn_token_id == 7


POINTER = (
    f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0a' * 32}\nsize "
    f"16060522240\n"
)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_each_file_of_a_checkpoint_that_is_a_pointer_is_named(tmp_path, name):
    folder = shutil.copytree(model_path("demo"), tmp_path / "model")
    (folder / name).write_text(POINTER)
    expected = (
        f"{folder / name} is a Git LFS pointer, not the file itself; run git lfs pull "
        f"in {folder}"
    )
    for check in (load_config, guide_config, start_engine):
        with pytest.raises(ValueError, match="is a Git LFS pointer") as caught:
            check(str(folder))
        assert str(caught.value) == expected


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_dream_runs_without_its_remote_code(engines, tmp_path, trust_remote_code):
    """The files of a released checkpoint, in small. Its remote code for config, model
    and tokenizer is poisoned.
    """
    special = {
        "<|endoftext|>": 258,
        "<|im_start|>": 259,
        "<|im_end|>": 260,
        "<|mask|>": 261,
    }
    remote = {
        "AutoConfig": "configuration_dream.DreamConfig",
        "AutoModel": "modeling_dream.DreamModel",
    }
    sizes: dict[str, Any] = {
        "vocab_size": 262,
        "mask_token_id": 261,
        "eos_token_id": 258,
    }
    folder = tiny_checkpoints.write("dream", tmp_path, auto_map=remote, **sizes)
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(characters)} | {
        "he": 256,
        "ll": 257,
    }
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\n")
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False) | {
        "special": True
    }
    tokenizer_config = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {
            str(i): {"content": token, **flags} for token, i in special.items()
        },
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    for module in ("configuration", "modeling", "generation_utils", "tokenization"):
        (folder / f"{module}_dream.py").write_text(
            f"open({str(tmp_path / 'was run')!r}, 'w')\nraise AssertionError"
        )
    llm = engines(
        folder, skip_tokenizer_init=False, trust_remote_code=trust_remote_code
    )
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("hello<|mask|>") == [
        256,
        257,
        tokenizer.convert_tokens_to_ids("o"),
        261,
    ]
    assert tokenizer.decode(tokenizer.encode("hello you")) == "hello you"
    (output,) = llm.generate(
        "hello you", DiffusionParams(gen_length=8, ignore_eos=True), use_tqdm=False
    )
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].text == tokenizer.decode(
        output.outputs[0].token_ids, skip_special_tokens=True
    )
    assert not (tmp_path / "was run").exists()
