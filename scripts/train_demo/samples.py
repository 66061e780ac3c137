"""Training samples: the tasks' examples as tokens, in batches of one canvas length; and
the tokenizer.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from dllm_engine.decisions.asking import TEMPLATE_FILE, as_shown, read_template
from dllm_engine.decisions.openai_form import read_question
from dllm_engine.demo import DEMO_MODEL_DIR
from dllm_engine.demo.questions import AskedText, ask
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
PLACE = "\0"
"""Stands for an answer while the template renders a response."""
CANVAS_ROUNDING = 16
"""Canvas lengths are multiples of this, so that batches need no padding and no
attention mask.
"""
MAX_CANVAS = 320
ASKED_KINDS = ("where", "code", *["anyone"] * 2, *["who"] * 3, *["count"] * 3)
"""Kinds of questions, as often as they are drawn: two are like tasks."""
TOGETHER = (1, 1, 2, 3, 4, 6)
"""Questions of a sample."""
DECIDED_SHARE = 0.7
"""Share of the questions' samples that are masked as a decision is: the answers alone.
"""


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


def prompt_and_pieces(asked: AskedText) -> tuple[str, list[tuple[str, bool]]]:
    """The prompt of questions that are asked together, and the right response in
    pieces, which are tokenized on their own: literal text, and answers (True).
    """
    template = read_template(DEMO_MODEL_DIR / TEMPLATE_FILE)
    questions = [read_question(each.question, []) for each in asked.asked]
    shown = [as_shown(question, question.labels) for question in questions]
    pieces = []
    for i, (question, each) in enumerate(zip(questions, asked.asked, strict=True)):
        number = i + 1 if len(questions) > 1 else 0
        response = template["response"](shown[i], number, PLACE)
        before, behind = response.split(PLACE)
        space = " " if before.endswith(" ") else ""
        pieces += [
            (before.removesuffix(" "), False),
            (space + question.labels[each.option], True),
            (behind, False),
        ]
    return template["prompt"](asked.text, shown, "labels"), pieces


def _rounded(length: int) -> int:
    return -(-length // CANVAS_ROUNDING) * CANVAS_ROUNDING


TASK_WEIGHTS = {
    "names": 0.18,
    "keys": 0.24,
    "facts": 0.21,
    "reverse": 0.18,
    "copy": 0.15,
    "chat": 0.04,
}


@dataclass(frozen=True)
class Mix:
    """What samples are drawn, and how many at a time."""

    long_responses: float = 0.15
    """Share of the tasks' samples with a response of 64 or 128 tokens in place of 32,
    all but the answer being end-of-text.
    """
    questions: float = 0.0
    """Share of samples that are questions, asked as a server asks them."""
    lists: float = 1.0
    """How much more often lists are reversed and copied than in ``TASK_WEIGHTS``."""
    chats: float = 0.0
    """Share of samples with one or two turns before."""
    batch_tokens: int = 2048

    def task_weights(self) -> list[float]:
        """How often each of ``TASK_WEIGHTS`` is drawn."""
        return [
            weight * (self.lists if task in ("reverse", "copy") else 1.0)
            for task, weight in TASK_WEIGHTS.items()
        ]


class Sample(NamedTuple):
    """A tokenized example: the clean canvas, ends with EOS up to its length."""

    tokens: list[int]
    prompt_length: int
    answer_end: int
    """First position after the answer and its first EOS."""
    is_recall: bool
    is_decided: list[bool]
    """Tokens that are hidden, as for a decision; none: they are drawn."""


class Batch(NamedTuple):
    """Samples of one canvas length: ``tokens`` and ``is_decided`` [batch, length], the
    rest [batch].
    """

    tokens: Tensor
    prompt_lengths: Tensor
    answer_ends: Tensor
    is_recall: Tensor
    is_decided: Tensor


def _sample(
    prompt: list[int], answer: list[int], is_decided: list[bool], *, is_recall: bool
) -> Sample:
    """The sample of a canvas as long as ``is_decided``."""
    answer_end = len(prompt) + len(answer) + 1
    tail = [EOS] * (len(is_decided) - len(prompt) - len(answer))
    tokens = prompt + answer + tail
    return Sample(tokens, len(prompt), answer_end, is_recall, is_decided)


class SampleStream:
    """Endless training batches of equal canvas length, in an order fixed
    by the seed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        max_pairs: int,
        mix: Mix,
    ) -> None:
        self.tokenizer = tokenizer
        self.mix = mix
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
            if len(waiting[length]) * length > self.mix.batch_tokens - length:
                yield Batch(*map(torch.tensor, zip(*waiting.pop(length), strict=True)))

    def _draw(self) -> Sample:
        if self.mix.questions and self._rng.random() < self.mix.questions:
            return self._draw_questions()
        return self._draw_task()

    def _draw_questions(self) -> Sample:
        """One question or several together, as a server asks them."""
        rng = self._rng
        self._next_seed += 1
        together = rng.choice(TOGETHER)
        filler = rng.uniform(0.1, 0.6) if rng.random() < 0.3 else 0.0
        (text,) = ask(self._next_seed, 1, ASKED_KINDS, together, filler)
        prompt, pieces = prompt_and_pieces(text)
        response, is_answer = [], []
        for piece, is_one in pieces:
            tokens = self.tokenizer.encode(piece).ids
            response += tokens
            is_answer += [is_one] * len(tokens)
        prompt_tokens = self._prompt_tokens(prompt)
        answer_end = len(prompt_tokens) + len(response) + 1
        if rng.random() < DECIDED_SHARE:
            is_decided = [False] * len(prompt_tokens) + is_answer + [False]
        else:
            length = _rounded(max(len(prompt_tokens) + GEN_LENGTH, answer_end))
            is_decided = [False] * length
        return _sample(prompt_tokens, response, is_decided, is_recall=True)

    def _draw_task(self) -> Sample:
        rng = self._rng
        task = rng.choices(list(TASK_WEIGHTS), self.mix.task_weights())[0]
        limits: dict[str, Any] = {}
        if task != "chat":
            filler = rng.uniform(0.1, 0.7) if rng.random() < 0.4 else 0.0
            limits = {
                "pairs": (1, min(self.max_pairs, MAX_PAIRS[task])),
                "filler": filler,
            }
        self._next_seed += 1
        (example,) = make_examples(task, 1, self._next_seed, **limits)
        prompt = self._prompt_tokens(example.prompt)
        answer = self.tokenizer.encode(" " + example.answer).ids
        is_long = rng.random() < self.mix.long_responses
        response_length = rng.choice((2, 4)) * GEN_LENGTH if is_long else GEN_LENGTH
        is_decided = [False] * _rounded(len(prompt) + response_length)
        return _sample(prompt, answer, is_decided, is_recall=task in RECALL_TASKS)

    def _prompt_tokens(self, user_text: str) -> list[int]:
        text = render_prompt(user_text)
        if self.mix.chats and self._rng.random() < self.mix.chats:
            for _ in range(self._rng.choice((1, 1, 2))):
                task = self._rng.choice(list(TASK_WEIGHTS))
                self._next_seed += 1
                pairs = None if task == "chat" else (1, 6)
                (turn,) = make_examples(task, 1, self._next_seed, pairs=pairs)
                space = self._rng.choice((" ", "  "))
                text = f"{render_prompt(turn.prompt)}{space}{turn.answer}\n{text}"
        return self.tokenizer.encode(text).ids
