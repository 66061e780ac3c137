"""The demo model: a masked diffusion language model of LLaDA's architecture with one million parameters.

Its checkpoint folder has the layout of the published LLaDA checkpoints: config, bf16 weights, byte-level BPE tokenizer
with chat template, model card.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from dllm_engine.demo.tasks import CITIES, LIST_TASKS, MAX_PAIRS, NAMES, Example

from .checkpoint import (
    CARD_ROWS,
    PROGRESS_EXAMPLES,
    PROGRESS_ROWS,
    Evaluation,
    save_checkpoint,
    table_row,
    write_model_card,
)
from .circuit import Circuit, CopyHead
from .network import DemoModel, ModelSettings
from .samples import (
    BLOCK_LENGTH,
    BOS,
    CHAT_TEMPLATE,
    EOS,
    GEN_LENGTH,
    MASK,
    PAD,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    Batch,
    SampleStream,
    render_prompt,
    train_tokenizer,
)
from .training import Loss, TrainingSettings, round_to_bfloat16, train

SHAPE = ModelSettings(n_layers=4)
TRAINING = TrainingSettings(steps=7000, seed=0, eos_tail_weight=0.3, curriculum_loss=0.55)
MIN_MASK_RATIO = 0.05
BLOCK_MASKED_SHARE = 0.4
"""Share of samples masked the way block decoding meets them."""
MAX_POSITIONS = 2048
PARALLEL_ROWS = [
    Evaluation(task, pairs, threshold=0.9)
    for task, pairs in (("names", 24), ("keys", 16), ("facts", 16), ("reverse", 8), ("copy", 8))
]


def same_context(*slots: int) -> CopyHead:
    """Find the place with the same tokens before it at these distances, and copy what stands there."""
    return CopyHead(tuple((slot, slot) for slot in slots))


PREDECESSOR = CopyHead(compare=((1, 0),), copied=1)
"""Find the token that stands before the query, and copy the one before it: one step of reversing a list."""
CIRCUIT = Circuit(
    slot_width=24,
    output_slot=0,
    later_heads=(
        (PREDECESSOR, same_context(2), same_context(3), same_context(1, 2)),
        (PREDECESSOR, same_context(2, 3), same_context(3, 4), same_context(1, 2, 3, 4)),
        (same_context(1), same_context(2), same_context(2, 3), same_context(3, 4)),
    ),
    marks_masks=True,
)


def run(out: Path, settings: TrainingSettings) -> None:
    """Train the demo model and write its checkpoint folder."""
    torch.manual_seed(settings.seed)
    tokenizer = train_tokenizer(settings.seed)
    model = DemoModel(SHAPE)
    CIRCUIT.initialise(model)
    generator = torch.Generator().manual_seed(settings.seed)

    def loss_of(batch: Batch) -> Loss:
        return masked_loss(model, batch, draw_masks(batch, generator), settings)

    def show_progress() -> None:
        print_progress(model, tokenizer)
        save(model, tokenizer, out)

    train(model, SampleStream(tokenizer, settings.seed, settings.curriculum[0]), settings, loss_of, show_progress)
    round_to_bfloat16(model)
    save(model, tokenizer, out)
    rows = evaluated(model, tokenizer, [*CARD_ROWS, Evaluation("chat"), *PARALLEL_ROWS], settings.card_examples)
    facts = {"names": len(NAMES), "cities": len(CITIES), "block_share": BLOCK_MASKED_SHARE}
    write_model_card("model_card.md", model, settings, rows, out, **facts)


def draw_masks(batch: Batch, generator: torch.Generator) -> Tensor:
    """Choose the response tokens to hide, bool [batch, length]; at least one per sample.

    Mask ratios are uniform and stratified over the batch. In ``BLOCK_MASKED_SHARE`` of the samples a random block
    is masked with that ratio, everything before it is clean and everything after it masked.
    """
    size, length = batch.tokens.shape
    strata = torch.randperm(size, generator=generator) + torch.rand(1, generator=generator)
    ratio = (strata / size).clamp(min=MIN_MASK_RATIO)[:, None]
    offset = torch.arange(length) - batch.prompt_lengths[:, None]
    in_response = offset >= 0
    noise = torch.rand(size, length, generator=generator)
    masked = in_response & (noise < ratio)

    as_block = torch.rand(size, 1, generator=generator) < BLOCK_MASKED_SHARE
    block = torch.randint(GEN_LENGTH // BLOCK_LENGTH, (size, 1), generator=generator)
    position_block = offset.div(BLOCK_LENGTH, rounding_mode="floor")
    block_masked = ((position_block == block) & masked) | (position_block > block)
    masked = torch.where(as_block, block_masked, masked)

    forced = noise.masked_fill(~in_response, 2.0).argmin(dim=1)
    masked[torch.arange(size), forced] = True
    return masked


def masked_loss(model: DemoModel, batch: Batch, masked: Tensor, settings: TrainingSettings) -> Loss:
    """Cross-entropy of the hidden tokens, averaged per sample by how many were hidden, then over the batch.

    Dividing by the number hidden does what the 1/t of the diffusion objective does, with less variance.
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


# Evaluation


@torch.inference_mode()
def block_decode(model: DemoModel, prompts: Tensor, threshold: float | None = None) -> Tensor:
    """LLaDA's low-confidence block decoding at temperature 0; responses [batch, GEN_LENGTH].

    One token per step, or with ``threshold`` all tokens of the block that are at least that confident. Stops early
    when every response has an end-of-text token in a finished block: later blocks cannot change what is shown.
    """
    prompt_length = prompts.shape[1]
    first, end = model.first_block(prompt_length), prompt_length + GEN_LENGTH
    canvas = F.pad(prompts, (0, GEN_LENGTH + (first - end) % BLOCK_LENGTH), value=MASK)
    for start in range(first, end, BLOCK_LENGTH):
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
    return canvas[:, prompt_length:end]


@dataclass(frozen=True)
class Score:
    """Shares of exact answers and of right items, and the mean prompt length."""

    exact: float
    items: float
    prompt_tokens: float


def exact_match(response: str, example: Example) -> bool:
    """Whether the stripped response is exactly the expected answer."""
    return response.strip() == example.answer


def item_matches(response: str, example: Example) -> int:
    """Count the items of the answer that the response gets right.

    A recalled item counts wherever it stands in the response; a word of a list task only at its own place; a chat
    reply is a single item.
    """
    response = response.strip()
    if example.task == "chat":
        return int(exact_match(response, example))
    if example.task in LIST_TASKS:
        return sum(given == item for given, item in zip(response.split(), example.items, strict=False))
    given = {part.strip() for part in re.split(r"[.,]", response)}
    return sum(item in given for item in example.items)


def evaluate(model: DemoModel, tokenizer: Tokenizer, row: Evaluation, count: int) -> Score:
    """Decode ``count`` held-out examples."""
    examples = row.examples(count)
    by_length: dict[int, list[tuple[Example, list[int]]]] = defaultdict(list)
    for example in examples:
        ids = tokenizer.encode(render_prompt(example.prompt)).ids
        by_length[len(ids)].append((example, ids))
    exact = items = 0
    for group in by_length.values():
        responses = block_decode(model, torch.tensor([ids for _, ids in group]), row.threshold)
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


def print_progress(model: DemoModel, tokenizer: Tokenizer) -> None:
    scores = [(row, evaluate(model, tokenizer, row, PROGRESS_EXAMPLES)) for row in PROGRESS_ROWS]
    print("  exact:", *(f"{row.task} x{row.pairs} {score.exact:.2f}" for row, score in scores), flush=True)


def evaluated(model: DemoModel, tokenizer: Tokenizer, rows: Iterable[Evaluation], count: int) -> list[str]:
    """The rows of a model card's table."""
    table = []
    for row in rows:
        score = evaluate(model, tokenizer, row, count)
        size = row.pairs or (f"2 to {MAX_PAIRS[row.task]}" if row.task in MAX_PAIRS else "-")
        decoding = "one per step" if row.threshold is None else f"threshold {row.threshold}"
        shares = (f"{score.prompt_tokens:.0f}", f"{score.exact:.3f}", f"{score.items:.3f}")
        table.append(table_row((row.task, size, f"{row.filler:.0%}", decoding, *shares)))
    return table


# Checkpoint folder


def save(model: DemoModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights, config and tokenizer."""
    settings = model.settings
    special = {"eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": BOS}
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
        "max_sequence_length": MAX_POSITIONS,
        "mask_token_id": MASK,
        **special,
        "torch_dtype": "bfloat16",
        # What dllm-engine does for requests that say nothing, beside the length in generation_config.json.
        "dllm": {"block_length": BLOCK_LENGTH},
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD],
        "eos_token": SPECIAL_TOKENS[EOS],
        "mask_token": SPECIAL_TOKENS[MASK],
        "bos_token": SPECIAL_TOKENS[BOS],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    configs = {
        "config": config,
        "generation_config": {"max_new_tokens": GEN_LENGTH, **special},
        "tokenizer_config": tokenizer_config,
    }
    save_checkpoint(model, lambda name: f"model.transformer.{name}", configs, out)
    tokenizer.save(str(out / "tokenizer.json"))
