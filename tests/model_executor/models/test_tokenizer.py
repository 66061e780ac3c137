"""Dream's checkpoints name a tokenizer class in remote code; ours takes its place."""

import json

import pytest
from tokenizers import pre_tokenizers

from dllm_engine import DiffusionParams
from tests.support import tiny_checkpoints

SPECIAL = {"<|endoftext|>": 258, "<|im_start|>": 259, "<|im_end|>": 260, "<|mask|>": 261}


@pytest.fixture
def dream_with_tokenizer(tmp_path):
    """A random Dream checkpoint with the tokenizer files of the released ones, in small, and poisoned remote code."""
    folder = tiny_checkpoints.write_dream(tmp_path, vocab_size=262, mask_token_id=261, eos_token_id=258)
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(characters)} | {"he": 256, "ll": 257}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\n")
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False) | {"special": True}
    tokenizer_config = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {str(i): {"content": token, **flags} for token, i in SPECIAL.items()},
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "tokenization_dream.py").write_text("raise AssertionError('remote code was run')")
    return folder


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_dream_tokenizes_without_its_remote_code(engines, dream_with_tokenizer, trust_remote_code):
    llm = engines(dream_with_tokenizer, skip_tokenizer_init=False, trust_remote_code=trust_remote_code)
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("hello<|mask|>") == [256, 257, tokenizer.convert_tokens_to_ids("o"), 261]
    assert tokenizer.decode(tokenizer.encode("hello you")) == "hello you"
    (output,) = llm.generate("hello you", DiffusionParams(gen_length=8, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
