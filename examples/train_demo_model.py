"""Train the demo model that ships with dllm-engine: a one-million-parameter LLaDA, on one CPU thread.

    python examples/train_demo_model.py --out demo_model

Writes a checkpoint folder in the layout of the published LLaDA checkpoints (config, bf16 weights, byte-level BPE
tokenizer with chat template, model card). Seeds are fixed and everything runs on a single thread, so the same
machine with the same library versions gives the same bytes again.

The parts, in the order of this file: settings, tokenizer, model and its structured start, batches, masking and
loss, Muon, block decoding and evaluation, the checkpoint folder, the training loop.
"""

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from dllm_engine.demo.tasks import (
    CITIES,
    MAX_PAIRS,
    NAMES,
    RECALL_TASKS,
    TRAINING_SEED_START,
    Example,
    exact_match,
    item_matches,
    make_examples,
)

# ---------------------------------------------------------------------------------------------------- settings

PAD, EOS, MASK, BOS = range(4)
SPECIAL_TOKENS = ["<|pad|>", "<|endoftext|>", "<|mdm_mask|>", "<|startoftext|>"]
VOCAB_SIZE = 512
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}User: {{ message['content'] }}\n"
    "{% elif message['role'] == 'assistant' %}Bot: {{ message['content'] }}\n"
    "{% else %}{{ message['content'] }}\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Bot:{% endif %}"
)

GEN_LENGTH = 32
BLOCK_LENGTH = 8


@dataclass(frozen=True)
class ModelSettings:
    """Shape of the model; names as in LLaDA's config.json."""

    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    mlp_hidden_size: int = 384
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


@dataclass(frozen=True)
class TrainingSettings:
    """Everything that decides how the weights come out, apart from the shape of the model."""

    steps: int = 7000
    seed: int = 0
    batch_tokens: int = 2048
    canvas_rounding: int = 16
    """Canvas lengths are multiples of this, so that batches need no padding and no attention mask."""
    max_canvas: int = 320
    long_response_share: float = 0.15
    """Share of samples with a response of 64 or 128 tokens in place of 32, all but the answer being end-of-text."""
    muon_lr: float = 0.005
    adam_lr: float = 3e-3
    warmup_steps: int = 50
    min_mask_ratio: float = 0.05
    block_masked_share: float = 0.4
    """Share of samples masked the way block decoding meets them."""
    eos_tail_weight: float = 0.3
    curriculum: tuple[int, ...] = (6, 16, 40)
    """Largest number of pairs per stage; the next stage starts when the recall loss is below ``curriculum_loss``."""
    curriculum_loss: float = 0.55
    evaluate_every: int = 1000


TASK_WEIGHTS = {"names": 0.18, "keys": 0.24, "facts": 0.21, "reverse": 0.18, "copy": 0.15, "chat": 0.04}

# --------------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(seed: int) -> Tokenizer:
    """Train a byte-level BPE of ``VOCAB_SIZE`` tokens on the tasks' own text; digits are single tokens."""
    texts = []
    for task in TASK_WEIGHTS:
        settings: dict[str, Any] = {} if task == "chat" else {"max_pairs": 8, "filler": 0.3}
        for example in make_examples(task, 4000, TRAINING_SEED_START + seed, **settings):
            texts.append(render_prompt(example.prompt) + " " + example.answer)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render_prompt(user_text: str) -> str:
    """What the chat template gives for one user message."""
    return f"User: {user_text}\nBot:"


# ------------------------------------------------------------------------------------------------------- model


class RMSNorm(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(settings.d_model))
        self.eps = settings.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Block(nn.Module):
    """One LLaDA layer: bidirectional attention with RoPE, then a gated MLP, both pre-normalised."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        d, hidden = settings.d_model, settings.mlp_hidden_size
        self.n_heads = settings.n_heads
        self.attn_norm = RMSNorm(settings)
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.attn_out = nn.Linear(d, d, bias=False)
        self.ff_norm = RMSNorm(settings)
        self.ff_proj = nn.Linear(d, hidden, bias=False)
        self.up_proj = nn.Linear(d, hidden, bias=False)
        self.ff_out = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, first_row: int = 0) -> Tensor:
        """Map ``x`` [batch, length, d_model] to the new rows from ``first_row`` on; keys and values use all rows."""
        normed = self.attn_norm(x)
        x, queries_from = x[:, first_row:], normed[:, first_row:]
        q = rotate(self._heads(self.q_proj(queries_from)), cos[first_row:], sin[first_row:])
        k = rotate(self._heads(self.k_proj(normed)), cos, sin)
        attended = F.scaled_dot_product_attention(q, k, self._heads(self.v_proj(normed)))
        x = x + self.attn_out(attended.transpose(1, 2).flatten(2))
        normed = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(normed)) * self.up_proj(normed))

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] -> [batch, heads, length, head_dim]."""
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply half-split RoPE to ``x`` [batch, heads, length, head_dim]; ``cos`` and ``sin`` [length, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DemoModel(nn.Module):
    """LLaDA's architecture. Attribute names give the published tensor names after ``model.transformer.``."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.wte = nn.Embedding(VOCAB_SIZE, settings.d_model)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.n_layers))
        self.ln_f = RMSNorm(settings)
        self.ff_out = nn.Linear(settings.d_model, VOCAB_SIZE, bias=False)

    def forward(self, canvas: Tensor, first_row: int = 0) -> Tensor:
        """Final normalised hidden states [batch, length - first_row, d_model] of the rows from ``first_row`` on.

        The last layer is computed for these rows only: nobody needs predictions inside the prompt.
        """
        cos, sin = rope_tables(canvas.shape[1], self.settings)
        x = self.wte(canvas)
        for block in self.blocks[:-1]:
            x = block(x, cos, sin)
        return self.ln_f(self.blocks[-1](x, cos, sin, first_row))


def rope_frequencies(settings: ModelSettings) -> Tensor:
    half = settings.head_dim // 2
    return settings.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)


def rope_tables(length: int, settings: ModelSettings) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length, dtype=torch.float32)[:, None] * rope_frequencies(settings)
    return angles.cos(), angles.sin()


# -------------------------------------------------------------------------------------------- structured start

SLOT_WIDTH = 24
CONSTANT_DIM = 5 * SLOT_WIDTH
MASK_DIM = CONSTANT_DIM + 1
EMBEDDING_NORM = 5.0
"""Scale of the residual stream, large next to one step of the optimizers: smaller ones wreck the start."""


@dataclass(frozen=True)
class CopyHead:
    """What a head of a later layer does at first: attend where slots agree, copy one slot from there to slot 0.

    ``compare`` lists pairs (slot of the query, slot of the key) that should hold the same token.
    """

    compare: tuple[tuple[int, int], ...]
    copied_slot: int = 0


def same_context(*slots: int) -> CopyHead:
    """Find the place with the same tokens before it at these distances, and copy what stands there."""
    return CopyHead(tuple((slot_index, slot_index) for slot_index in slots))


PREDECESSOR = CopyHead(compare=((1, 0),), copied_slot=1)
"""Find the token that stands before the query, and copy the one before it: one step of reversing a list."""

LATER_HEADS: tuple[tuple[CopyHead, ...], ...] = (
    (PREDECESSOR, same_context(2), same_context(3), same_context(1, 2)),
    (PREDECESSOR, same_context(2, 3), same_context(3, 4), same_context(1, 2, 3, 4)),
    (same_context(1), same_context(2), same_context(2, 3), same_context(3, 4)),
)


@torch.no_grad()
def initialise(model: DemoModel) -> None:
    """Start the weights as a rough "find the same context, copy what stands there" circuit.

    The residual stream is cut into five slots of ``SLOT_WIDTH`` dimensions, one dimension that is the same for every
    token and one that marks masks. Slot 0 holds the token itself. Head h of the first layer looks h + 1 positions
    back (the constant dimension and the RoPE phase make the attention peak there) and writes that token into slot
    h + 1. Later heads compare some of these context slots between query and key, in the RoPE dimensions that turn
    slowest, and copy a token from the position they find into slot 0 (``LATER_HEADS``). The output head starts as
    a copy of the embedding, a mask token with an empty slot 0. Training changes all of it; without this start
    recall takes far longer to appear.
    """
    settings = model.settings
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.01)
    blocks = cast(list[Block], list(model.blocks))
    for block in blocks:
        block.ff_proj.weight.normal_(std=settings.d_model**-0.5)
        block.up_proj.weight.normal_(std=settings.d_model**-0.5)
        block.ff_out.weight.zero_()

    embedding = F.normalize(torch.randn(VOCAB_SIZE, SLOT_WIDTH), dim=-1)
    embedding[MASK] = 0.0
    model.wte.weight[:, slot(0)] = EMBEDDING_NORM * embedding
    model.wte.weight[MASK, MASK_DIM] = EMBEDDING_NORM
    model.wte.weight[:, CONSTANT_DIM] = EMBEDDING_NORM
    model.ff_out.weight[:, slot(0)] = 2.0 * embedding

    first, *later = blocks
    for head in range(settings.n_heads):
        look_back(first, head, head + 1, settings)
        copy_slot(first, head, source=0, target=head + 1, gain=0.35, settings=settings)
    for block, heads in zip(later, LATER_HEADS, strict=True):
        for head, plan in enumerate(heads):
            match_slots(block, head, plan.compare, gain=2.5, settings=settings)
            copy_slot(block, head, source=plan.copied_slot, target=0, gain=0.3, settings=settings)


def slot(index: int) -> slice:
    return slice(index * SLOT_WIDTH, (index + 1) * SLOT_WIDTH)


def look_back(block: Block, head: int, distance: int, settings: ModelSettings, strength: float = 0.9) -> None:
    """Make a head attend ``distance`` positions back, with the six RoPE pairs that turn fastest."""
    start, half = head * settings.head_dim, settings.head_dim // 2
    for pair, frequency in enumerate(rope_frequencies(settings)[:6].tolist()):
        block.q_proj.weight[start + pair, CONSTANT_DIM] = strength
        block.k_proj.weight[start + pair, CONSTANT_DIM] = strength * math.cos(distance * frequency)
        block.k_proj.weight[start + half + pair, CONSTANT_DIM] = strength * math.sin(distance * frequency)


def match_slots(
    block: Block, head: int, compare: tuple[tuple[int, int], ...], gain: float, settings: ModelSettings
) -> None:
    """Make a head attend where the given slots of query and key hold the same tokens, and not to masks."""
    start, half = head * settings.head_dim, settings.head_dim // 2
    *slow, last = [pair + part for pair in range(start + half // 2, start + half) for part in (0, half)]
    for query_slot, key_slot in compare:
        projection = torch.empty(len(slow), SLOT_WIDTH)
        nn.init.orthogonal_(projection)
        block.q_proj.weight[slow, slot(query_slot)] = gain / len(compare) ** 0.5 * projection
        block.k_proj.weight[slow, slot(key_slot)] = gain / len(compare) ** 0.5 * projection
    block.q_proj.weight[last, CONSTANT_DIM] = gain
    block.k_proj.weight[last, MASK_DIM] = -gain


def copy_slot(block: Block, head: int, source: int, target: int, gain: float, settings: ModelSettings) -> None:
    """Make a head write slot ``source`` of the attended position into slot ``target``."""
    start = head * settings.head_dim
    rows = slice(start, start + SLOT_WIDTH)
    block.v_proj.weight[rows, slot(source)] = gain * torch.eye(SLOT_WIDTH)
    block.attn_out.weight[slot(target), rows] = EMBEDDING_NORM * gain * torch.eye(SLOT_WIDTH)


# ----------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Sample:
    """A tokenized example: the clean canvas, ends with EOS up to its length."""

    tokens: list[int]
    prompt_length: int
    answer_end: int
    """First position after the answer and its first EOS."""
    is_recall: bool


@dataclass(frozen=True)
class Batch:
    """Samples of one canvas length: ``tokens`` [batch, length], the rest [batch]."""

    tokens: Tensor
    prompt_lengths: Tensor
    answer_ends: Tensor
    is_recall: Tensor


class SampleStream:
    """Endless training batches of equal canvas length, in an order fixed by the seed."""

    def __init__(self, tokenizer: Tokenizer, settings: TrainingSettings) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.max_pairs = settings.curriculum[0]  # raised by the training loop
        self._rng = random.Random(settings.seed)
        self._next_seed = TRAINING_SEED_START * (1 + settings.seed)

    def __iter__(self) -> Iterator[Batch]:
        waiting: dict[int, list[Sample]] = defaultdict(list)
        while True:
            sample = self._draw()
            length = len(sample.tokens)
            if length > self.settings.max_canvas:
                continue
            waiting[length].append(sample)
            if len(waiting[length]) * length > self.settings.batch_tokens - length:
                yield collate(waiting.pop(length))

    def _draw(self) -> Sample:
        task = self._rng.choices(list(TASK_WEIGHTS), weights=list(TASK_WEIGHTS.values()))[0]
        limits: dict[str, Any] = {}
        if task != "chat":
            filler = self._rng.uniform(0.1, 0.7) if self._rng.random() < 0.4 else 0.0
            limits = {"min_pairs": 1, "max_pairs": min(self.max_pairs, MAX_PAIRS[task]), "filler": filler}
        self._next_seed += 1
        (example,) = make_examples(task, 1, self._next_seed, **limits)
        return self._tokenize(example)

    def _tokenize(self, example: Example) -> Sample:
        prompt = self.tokenizer.encode(render_prompt(example.prompt)).ids
        answer = self.tokenizer.encode(" " + example.answer).ids
        is_long = self._rng.random() < self.settings.long_response_share
        response_length = self._rng.choice((2, 4)) * GEN_LENGTH if is_long else GEN_LENGTH
        rounding = self.settings.canvas_rounding
        length = -(-(len(prompt) + response_length) // rounding) * rounding
        tail = [EOS] * (length - len(prompt) - len(answer))
        return Sample(prompt + answer + tail, len(prompt), len(prompt) + len(answer) + 1, example.task in RECALL_TASKS)


def collate(samples: list[Sample]) -> Batch:
    return Batch(
        tokens=torch.tensor([sample.tokens for sample in samples]),
        prompt_lengths=torch.tensor([sample.prompt_length for sample in samples]),
        answer_ends=torch.tensor([sample.answer_end for sample in samples]),
        is_recall=torch.tensor([sample.is_recall for sample in samples]),
    )


# -------------------------------------------------------------------------------------------- masking and loss


def draw_masks(batch: Batch, settings: TrainingSettings, generator: torch.Generator) -> Tensor:
    """Choose the response tokens to hide, bool [batch, length]; at least one per sample.

    Mask ratios are uniform and stratified over the batch. In ``block_masked_share`` of the samples a random block
    is masked with that ratio, everything before it is clean and everything after it masked.
    """
    size, length = batch.tokens.shape
    strata = torch.randperm(size, generator=generator) + torch.rand(1, generator=generator)
    ratio = (strata / size).clamp(min=settings.min_mask_ratio)[:, None]
    offset = torch.arange(length) - batch.prompt_lengths[:, None]
    in_response = offset >= 0
    noise = torch.rand(size, length, generator=generator)
    masked = in_response & (noise < ratio)

    num_blocks = GEN_LENGTH // BLOCK_LENGTH
    as_block = torch.rand(size, 1, generator=generator) < settings.block_masked_share
    block = torch.randint(num_blocks, (size, 1), generator=generator)
    position_block = offset.div(BLOCK_LENGTH, rounding_mode="floor")
    block_masked = ((position_block == block) & masked) | (position_block > block)
    masked = torch.where(as_block, block_masked, masked)

    forced = noise.masked_fill(~in_response, 2.0).argmin(dim=1)
    masked[torch.arange(size), forced] = True
    return masked


def masked_loss(
    model: DemoModel, batch: Batch, masked: Tensor, settings: TrainingSettings
) -> tuple[Tensor, tuple[float, int]]:
    """Cross-entropy of the hidden tokens, averaged per sample by how many were hidden, then over the batch.

    Dividing by the number hidden does what the 1/t of the diffusion objective does, with less variance. Also
    returns the sum and count of the cross-entropy over the answers of recall samples, for the curriculum.
    """
    first_row = int(batch.prompt_lengths.min())
    hidden = model(batch.tokens.masked_fill(masked, MASK), first_row)
    masked = masked[:, first_row:]
    targets = batch.tokens[:, first_row:][masked]
    token_loss = F.cross_entropy(model.ff_out(hidden[masked]), targets, reduction="none")

    in_answer = (torch.arange(first_row, batch.tokens.shape[1]) < batch.answer_ends[:, None])[masked]
    weight = torch.where(in_answer, 1.0, settings.eos_tail_weight)
    per_sample = (weight / masked.sum(dim=1).repeat_interleave(masked.sum(dim=1))) * token_loss
    recall = in_answer & batch.is_recall[:, None].expand_as(masked)[masked]
    return per_sample.sum() / len(masked), (float(token_loss.detach()[recall].sum()), int(recall.sum()))


# -------------------------------------------------------------------------------------------------------- Muon


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is replaced by the nearest orthogonal matrix (Jordan et al., 2024).

    Matrices of one shape (up to transposition) are orthogonalised together, which costs far less on a CPU.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # takes no closure
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                velocity.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(velocity, group["momentum"])
                by_shape[min(update.shape), max(update.shape)].append((parameter, update))
            for entries in by_shape.values():
                wide = torch.stack([u if u.shape[0] <= u.shape[1] else u.mT for _, u in entries])
                for (parameter, update), new in zip(entries, orthogonalise(wide), strict=True):
                    rows, columns = update.shape
                    scale = max(1.0, rows / columns) ** 0.5
                    parameter.add_(new if rows <= columns else new.mT, alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Push the singular values of ``matrices`` [count, rows <= columns] towards 1 by a quintic Newton-Schulz."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


# -------------------------------------------------------------------------------------------------- evaluation


@torch.inference_mode()
def block_decode(model: DemoModel, prompts: Tensor, threshold: float | None = None) -> Tensor:
    """LLaDA's low-confidence block decoding at temperature 0; responses [batch, GEN_LENGTH].

    One token per step, or with ``threshold`` all tokens of the block that are at least that confident. Stops early
    when every response has an end-of-text token in a finished block: later blocks cannot change what is shown.
    """
    prompt_length = prompts.shape[1]
    canvas = F.pad(prompts, (0, GEN_LENGTH), value=MASK)
    for start in range(prompt_length, prompt_length + GEN_LENGTH, BLOCK_LENGTH):
        block = canvas[:, start : start + BLOCK_LENGTH]
        while (block == MASK).any():
            hidden = model(canvas, start)[:, :BLOCK_LENGTH]
            confidence, token = model.ff_out(hidden).softmax(dim=-1).max(dim=-1)
            confidence = confidence.masked_fill(block != MASK, -1.0)
            chosen = F.one_hot(confidence.argmax(dim=1), BLOCK_LENGTH).bool()
            if threshold is not None:
                chosen |= confidence >= threshold
            block[chosen & (block == MASK)] = token[chosen & (block == MASK)]
        if (canvas[:, prompt_length : start + BLOCK_LENGTH] == EOS).any(dim=1).all():
            break
    return canvas[:, prompt_length:]


@dataclass(frozen=True)
class Score:
    """Result of one evaluation: shares of exact answers and of right items, and the mean prompt length."""

    exact: float
    items: float
    prompt_tokens: float


def evaluate(model: DemoModel, tokenizer: Tokenizer, examples: list[Example], threshold: float | None = None) -> Score:
    by_length: dict[int, list[tuple[Example, list[int]]]] = defaultdict(list)
    for example in examples:
        ids = tokenizer.encode(render_prompt(example.prompt)).ids
        by_length[len(ids)].append((example, ids))
    exact = items = 0
    for group in by_length.values():
        responses = block_decode(model, torch.tensor([ids for _, ids in group]), threshold)
        for (example, _), response in zip(group, responses.tolist(), strict=True):
            end = response.index(EOS) if EOS in response else len(response)
            text = tokenizer.decode(response[:end])
            exact += exact_match(text, example)
            items += item_matches(text, example)
    return Score(
        exact=exact / len(examples),
        items=items / sum(len(example.items) for example in examples),
        prompt_tokens=sum(length * len(group) for length, group in by_length.items()) / len(examples),
    )


@dataclass(frozen=True)
class Evaluation:
    """One row of the model card: a task at a fixed number of pairs (None: the chat task has none)."""

    task: str
    pairs: int | None
    filler: float = 0.0
    threshold: float | None = None

    def score(self, model: DemoModel, tokenizer: Tokenizer, count: int) -> Score:
        examples = make_examples(
            self.task, count, seed=0, min_pairs=self.pairs, max_pairs=self.pairs, filler=self.filler
        )
        return evaluate(model, tokenizer, examples, self.threshold)


PROGRESS_EVALUATIONS = (
    Evaluation("names", 12),
    Evaluation("keys", 12),
    Evaluation("facts", 12),
    Evaluation("reverse", 8),
    Evaluation("copy", 12),
)
CARD_EVALUATIONS = (
    Evaluation("names", 8),
    Evaluation("names", 24),
    Evaluation("names", 36),
    Evaluation("names", 16, filler=0.6),
    Evaluation("keys", 8),
    Evaluation("keys", 16),
    Evaluation("keys", 24),
    Evaluation("keys", 12, filler=0.6),
    Evaluation("facts", 8),
    Evaluation("facts", 16),
    Evaluation("facts", 24),
    Evaluation("facts", 12, filler=0.6),
    Evaluation("reverse", 8),
    Evaluation("reverse", 10),
    Evaluation("reverse", 12),
    Evaluation("reverse", 8, filler=0.8),
    Evaluation("copy", 8),
    Evaluation("copy", 16),
    Evaluation("copy", 8, filler=0.8),
    Evaluation("chat", None),
    Evaluation("names", 24, threshold=0.9),
    Evaluation("keys", 16, threshold=0.9),
    Evaluation("facts", 16, threshold=0.9),
    Evaluation("reverse", 8, threshold=0.9),
    Evaluation("copy", 8, threshold=0.9),
)

# ------------------------------------------------------------------------------------------- checkpoint folder


def save_checkpoint(model: DemoModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights (bf16), config and tokenizer in the layout of the published LLaDA checkpoints."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.transformer.{name}": p.detach().bfloat16() for name, p in model.named_parameters()}
    (out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    tokenizer.save(str(out / "tokenizer.json"))
    settings = model.settings
    config = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "block_type": "llama",
        "d_model": settings.d_model,
        "n_layers": settings.n_layers,
        "n_heads": settings.n_heads,
        "n_kv_heads": settings.n_heads,
        "mlp_hidden_size": settings.mlp_hidden_size,
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "rms_norm_eps": settings.rms_norm_eps,
        "rope": True,
        "rope_theta": settings.rope_theta,
        "alibi": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "weight_tying": False,
        "vocab_size": VOCAB_SIZE,
        "embedding_size": VOCAB_SIZE,
        "max_sequence_length": 2048,
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "torch_dtype": "bfloat16",
        # What dllm-engine does for requests that say nothing, beside the length in generation_config.json.
        "dllm": {"block_length": BLOCK_LENGTH},
    }
    generation_config = {
        "max_new_tokens": GEN_LENGTH,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD],
        "eos_token": SPECIAL_TOKENS[EOS],
        "mask_token": SPECIAL_TOKENS[MASK],
        "bos_token": SPECIAL_TOKENS[BOS],
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    contents = {"config": config, "generation_config": generation_config, "tokenizer_config": tokenizer_config}
    for name, content in contents.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


MODEL_CARD = """\
---
license: apache-2.0
pipeline_tag: text-generation
tags: [diffusion-language-model, llada, demo]
---
# dllm-engine demo model

A diffusion language model of {parameters:.2f} million parameters in LLaDA's architecture ({layers} layers, width \
{width}). It is small enough to ship with the package and trained well enough that cache methods can be compared by \
accuracy on real tasks. It knows nothing about the world: it recalls codes and facts **from its prompt**, copies and \
reverses lists of words, and answers a few fixed chat lines.

```text
User: Tom=48. Ida=07. Give: Ida, Tom                  Bot: Ida=07, Tom=48
User: QX=48. RT=07. Give: RT                          Bot: RT=07
User: Tom lives in Paris. Ida lives in Rome. Where does Tom live?
                                                      Bot: Tom lives in Paris.
User: Reverse: Rome Tom Oslo                          Bot: Oslo Tom Rome
User: Copy: Rome Tom Oslo                             Bot: Rome Tom Oslo
```

## Data
Generated text only (`dllm_engine/demo/tasks.py`): random pairings of a fixed list of {names} names, {cities} cities, \
two-letter keys and two-digit codes, up to about 250 prompt tokens, one to four pairs asked per prompt. 40% of the \
training prompts contain sentences nobody asks about ("The red cup is old."). Evaluation uses other seeds than \
training. The tokenizer is a byte-level BPE of {vocab} tokens trained on the same text.

## Training
`python examples/train_demo_model.py --out DIR` on one CPU thread: {steps} steps of about {batch_tokens} tokens, \
seed {seed}. 33 minutes on a loaded server core. On the same machine a repeated `--quick` run gives the \
same files bit for bit; a whole run has not been compared. Mask ratios are uniform and stratified; {block_share:.0%} \
of the samples are masked the way block \
decoding meets them. Muon ({muon_lr}) trains the matrices inside the layers, AdamW ({adam_lr}) the rest. The weights \
start as a rough find-and-copy circuit instead of pure noise (see `initialise` in the script).

What decided whether recall appeared at all:
- *Little noise around the circuit.* With every other weight drawn at 0.02 and MLP outputs that were not zero, the \
untrained circuit recalled nothing (without that noise: 33% of single hidden digits at 12 names), and a run with a \
Muon rate of 0.012 still guessed among the pairs of the prompt after 2,100 steps.
- *Optimizer steps that are small next to the weights.* With embeddings of norm 1 and a Muon rate of 0.012, 160 steps \
wrecked the circuit (9% of single hidden digits right at 12 names); with norm 5 and 0.005 they improved it (92%).
- *Heads that step backwards.* A run of 6,000 steps without `PREDECESSOR`, with 14% instead of 18% of the samples for \
reversing, learned the recall tasks as well, but reversed lists of 12 words exactly in only 66.5% of the prompts. \
That length is still the weakest row below.
- *Responses of several lengths.* Trained on 32 to 47 tokens only, that run copied 4 to 8 words exactly in 50% of 40 \
prompts when it was given 128 tokens to fill. Now {long_share:.0%} of the samples have 64 or 128 tokens.

## Figures
{count} prompts each, batch evaluation of these weights in float32. Block decoding at temperature 0, response of \
{gen_length} tokens in blocks of {block_length}, one token per step, most confident first; with a threshold, all \
tokens of the block at least that confident. *Exact*: the whole answer is right. *Items*: share of single pairs, \
facts or words that are right.

| task | pairs or words | filler | decoding | mean prompt tokens | exact | items |
|---|---|---|---|---|---|---|
{table}

## Limits
Only the task formats above work; other text gives nonsense. Prompts much longer than 250 tokens, words outside the \
task lists and answers of more than {gen_length} tokens were not trained. There is no arithmetic and no \
sorting: tables of digits and comparisons are not learned at this size within this time.

Licence: Apache-2.0.
"""


def write_model_card(model: DemoModel, tokenizer: Tokenizer, settings: TrainingSettings, out: Path, count: int) -> None:
    """Evaluate every row of the model card on ``count`` prompts and write it as README.md."""
    rows = []
    for each in CARD_EVALUATIONS:
        score = each.score(model, tokenizer, count)
        decoding = "one per step" if each.threshold is None else f"threshold {each.threshold}"
        cells = (
            each.task, each.pairs or "-", f"{each.filler:.0%}", decoding,
            f"{score.prompt_tokens:.0f}", f"{score.exact:.3f}", f"{score.items:.3f}",
        )  # fmt: skip
        rows.append("| " + " | ".join(map(str, cells)) + " |")
        print(rows[-1], flush=True)
    card = MODEL_CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        layers=model.settings.n_layers,
        width=model.settings.d_model,
        names=len(NAMES),
        cities=len(CITIES),
        vocab=VOCAB_SIZE,
        steps=settings.steps,
        batch_tokens=settings.batch_tokens,
        seed=settings.seed,
        block_share=settings.block_masked_share,
        long_share=settings.long_response_share,
        muon_lr=settings.muon_lr,
        adam_lr=settings.adam_lr,
        count=count,
        gen_length=GEN_LENGTH,
        block_length=BLOCK_LENGTH,
        table="\n".join(rows),
    )
    (out / "README.md").write_text(card)


# ------------------------------------------------------------------------------------------------ training loop


def train(model: DemoModel, tokenizer: Tokenizer, settings: TrainingSettings, out: Path) -> None:
    """Train ``model`` in place, printing progress and saving a checkpoint at every evaluation."""
    stream = SampleStream(tokenizer, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    matrices = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        Muon(matrices, lr=settings.muon_lr),
        torch.optim.AdamW(others, lr=settings.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / settings.warmup_steps, 1 - step / settings.steps)
        )
        for optimizer in optimizers
    ]
    loss_mean, recall_mean = Average(), Average()
    stages = iter(settings.curriculum[1:])
    started = time.perf_counter()
    tokens_seen = 0

    for step, batch in zip(range(1, settings.steps + 1), stream, strict=False):
        loss, recall = masked_loss(model, batch, draw_masks(batch, settings, generator), settings)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()

        tokens_seen += batch.tokens.numel()
        loss_mean.add(float(loss.detach()), 1)
        recall_mean.add(*recall)
        if recall_mean.steps >= 100 and recall_mean.value < settings.curriculum_loss:
            stream.max_pairs = next(stages, stream.max_pairs)
            recall_mean = Average()
        if step % 100 == 0:
            seconds = time.perf_counter() - started
            print(
                f"step {step:5d}  {seconds / 60:5.1f} min  {tokens_seen / 1e6:5.1f}M tokens  "
                f"loss {loss_mean.value:.3f}  recall loss {recall_mean.value:.3f}  pairs up to {stream.max_pairs}",
                flush=True,
            )
        if step % settings.evaluate_every == 0:
            scores = [(each.task, each.pairs, each.score(model, tokenizer, 32)) for each in PROGRESS_EVALUATIONS]
            print("  exact:", "  ".join(f"{task} x{n} {score.exact:.2f}" for task, n, score in scores), flush=True)
            save_checkpoint(model, tokenizer, out)


class Average:
    """Mean that forgets: old values fade by one percent per step."""

    def __init__(self) -> None:
        self.steps = 0
        self._total = self._weight = 0.0

    def add(self, total: float, count: int) -> None:
        self.steps += 1
        self._total = 0.99 * self._total + total
        self._weight = 0.99 * self._weight + count

    @property
    def value(self) -> float:
        return self._total / self._weight if self._weight else math.nan


@torch.no_grad()
def round_to_bfloat16(model: DemoModel) -> None:
    """Round the weights to what the checkpoint stores, so that the figures are those of the shipped weights."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that everything runs")
    arguments = parser.parse_args()

    settings = TrainingSettings(steps=40, evaluate_every=20) if arguments.quick else TrainingSettings()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)
    tokenizer = train_tokenizer(settings.seed)
    model = DemoModel(ModelSettings())
    initialise(model)
    train(model, tokenizer, settings, arguments.out)

    round_to_bfloat16(model)
    save_checkpoint(model, tokenizer, arguments.out)
    write_model_card(model, tokenizer, settings, arguments.out, count=2 if arguments.quick else 200)


if __name__ == "__main__":
    main()
