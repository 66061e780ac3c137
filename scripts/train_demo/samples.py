"""Training samples: the tasks' examples as tokens, in batches of one canvas length; and
the tokenizer.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from dllm_engine.demo.tasks import (
    MAX_PAIRS,
    RECALL_TASKS,
    TRAINING_SEED_START,
    make_examples,
)

EOS, MASK = 1, 2
SPECIAL_TOKENS = ["<|pad|>", "<|endoftext|>", "<|mdm_mask|>", "<|startoftext|>"]
VOCAB_SIZE = 512
SPLIT_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GEN_LENGTH = 32
BLOCK_LENGTH = 8
BATCH_TOKENS = 2048
CANVAS_ROUNDING = 16
"""Canvas lengths are multiples of this, so that batches need no padding and no
attention mask.
"""
MAX_CANVAS = 320
TASK_WEIGHTS = {
    "names": 0.18,
    "keys": 0.24,
    "facts": 0.21,
    "reverse": 0.18,
    "copy": 0.15,
    "chat": 0.04,
}


def render_prompt(user_text: str) -> str:
    """What the chat template gives for one user message."""
    return f"User: {user_text}\nBot:"


def train_tokenizer(seed: int) -> Tokenizer:
    """Train a byte-level BPE of ``VOCAB_SIZE`` tokens on the tasks' own text; digits
    are single tokens.
    """
    texts = []
    for task in TASK_WEIGHTS:
        settings: dict[str, Any] = (
            {} if task == "chat" else {"pairs": (2, 8), "filler": 0.3}
        )
        for example in make_examples(
            task, 4000, TRAINING_SEED_START + seed, **settings
        ):
            texts.append(render_prompt(example.prompt) + " " + example.answer)
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Sample(NamedTuple):
    """A tokenized example: the clean canvas, ends with EOS up to its length."""

    tokens: list[int]
    prompt_length: int
    answer_end: int
    """First position after the answer and its first EOS."""
    is_recall: bool


class Batch(NamedTuple):
    """Samples of one canvas length: ``tokens`` [batch, length], the rest [batch]."""

    tokens: Tensor
    prompt_lengths: Tensor
    answer_ends: Tensor
    is_recall: Tensor


class SampleStream:
    """Endless training batches of equal canvas length, in an order fixed
    by the seed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        max_pairs: int,
        long_response_share: float,
    ) -> None:
        self.tokenizer = tokenizer
        self.long_response_share = long_response_share
        self.max_pairs = max_pairs  # raised by the training loop
        self._rng = random.Random(seed)
        self._next_seed = TRAINING_SEED_START * (1 + seed)

    def __iter__(self) -> Iterator[Batch]:
        waiting: dict[int, list[Sample]] = defaultdict(list)
        while True:
            sample = self._draw()
            length = len(sample.tokens)
            if length > MAX_CANVAS:
                continue
            waiting[length].append(sample)
            if len(waiting[length]) * length > BATCH_TOKENS - length:
                yield Batch(*map(torch.tensor, zip(*waiting.pop(length), strict=True)))

    def _draw(self) -> Sample:
        rng = self._rng
        task = rng.choices(list(TASK_WEIGHTS), weights=list(TASK_WEIGHTS.values()))[0]
        limits: dict[str, Any] = {}
        if task != "chat":
            filler = rng.uniform(0.1, 0.7) if rng.random() < 0.4 else 0.0
            limits = {
                "pairs": (1, min(self.max_pairs, MAX_PAIRS[task])),
                "filler": filler,
            }
        self._next_seed += 1
        (example,) = make_examples(task, 1, self._next_seed, **limits)
        prompt = self.tokenizer.encode(render_prompt(example.prompt)).ids
        answer = self.tokenizer.encode(" " + example.answer).ids
        is_long = rng.random() < self.long_response_share
        response_length = rng.choice((2, 4)) * GEN_LENGTH if is_long else GEN_LENGTH
        length = (
            -(-(len(prompt) + response_length) // CANVAS_ROUNDING) * CANVAS_ROUNDING
        )
        tail = [EOS] * (length - len(prompt) - len(answer))
        return Sample(
            prompt + answer + tail,
            len(prompt),
            len(prompt) + len(answer) + 1,
            task in RECALL_TASKS,
        )
