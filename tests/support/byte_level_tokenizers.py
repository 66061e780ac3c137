"""Small byte-level tokenizers for tests."""

import functools
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

TALE = """
There once was a weaver who counted her threads before she went to sleep, and in the morning there were always seven
more than she had counted. "Whoever brings me thread in the night," said the weaver, "must want something woven." So she
wove a cloth of 49 threads with a pattern of herons, and hung it in front of the window. Naïve as it was of her to think
that nobody would take it, nobody did; but the herons had turned their heads. 你好, 你们好。
"""
NOTE = """
def next_state(state, threshold=0.25): return state + 1 if state < threshold else 0  # the states are then sorted
for index in range(len(states)): print(index, states[index], sep=", ")
The other one is then stored; nothing else is sent to the other end. São Paulo, 12:30. Señor Ibáñez. 你们
"""


@functools.cache
def train_tokenizer(
    text: str, size: int, end: str | None = None
) -> PreTrainedTokenizerFast:
    """All bytes, a special token that ends a text, and merges learnt from a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[end] if end else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def spelled(tokenizer: PreTrainedTokenizerFast) -> dict[int, bytes]:
    """Bytes of all tokens but the special ones."""
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    special = set(tokenizer.all_special_ids)
    return {
        number: bytes(letters[letter] for letter in token)
        for token, number in tokenizer.get_vocab().items()
        if number not in special
    }


def copy_renumbered(guide: Path, folder: Path) -> Path:
    """A copy of a guide that gives its tokens other numbers."""
    shutil.copytree(guide, folder)
    weights = load_file(folder / "model.safetensors")
    size = weights["model.embed_tokens.weight"].shape[0]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(7))
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & weights.keys():
        weights[name] = torch.empty_like(weights[name]).index_copy_(
            0, order, weights[name]
        )
    save_file(weights, folder / "model.safetensors")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        token: int(order[number]) for token, number in vocabulary.items()
    }
    for token in tokenizer["added_tokens"]:
        token["id"] = int(order[token["id"]])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
