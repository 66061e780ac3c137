"""Train the demo guide: a small causal Llama that checks the demo model's drafts, on one CPU thread.

    python examples/train_demo_guide.py --out demo_guide

Guided Diffusion needs an autoregressive model that shares the diffusion model's tokenizer and knows the same tasks.
This one learns by teacher forcing on the very samples the demo model is trained on: prompt, answer, end-of-text up to
the end of the canvas. It writes a checkpoint folder in the layout of Hugging Face's ``LlamaForCausalLM`` (config, bf16
weights, the demo model's tokenizer files, model card).

Samples, optimizer and layers come from ``train_demo_model.py`` next to this file; here are, in this order: settings,
the causal model, its structured start, loss, evaluation, the checkpoint folder, the training loop.
"""

import argparse
import json
import math
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_demo_model import (
    BOS,
    CARD_EVALUATIONS,
    EOS,
    GEN_LENGTH,
    PAD,
    TASK_WEIGHTS,
    VOCAB_SIZE,
    Average,
    Batch,
    Block,
    DemoModel,
    ModelSettings,
    Muon,
    SampleStream,
    TrainingSettings,
    render_prompt,
    rope_frequencies,
    rotate,
    round_to_bfloat16,
)

from dllm_engine.demo import DEMO_MODEL_DIR
from dllm_engine.demo.tasks import MAX_PAIRS, Example, make_examples

# ---------------------------------------------------------------------------------------------------- settings

GUIDE = ModelSettings(d_model=128, n_layers=3, n_heads=4, mlp_hidden_size=384)
TRAINING = TrainingSettings(
    steps=3000,
    seed=1,  # other samples than the demo model saw
    eos_tail_weight=0.1,
    curriculum_loss=0.35,  # names and signs of an answer are easy to foresee, so the mean is lower than for masks
)
PROGRESS_TASKS = (("names", 12), ("keys", 12), ("facts", 12), ("reverse", 8), ("copy", 12))
MAX_POSITIONS = 2048

# ------------------------------------------------------------------------------------------------------- model


class CausalBlock(Block):
    """A layer of the demo model whose rows see only themselves and the rows before."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, first_row: int = 0) -> Tensor:
        """Map ``x`` [batch, length, d_model] to the new rows from ``first_row`` on."""
        length = x.shape[1]
        normed = self.attn_norm(x)
        x, queries_from = x[:, first_row:], normed[:, first_row:]
        q = rotate(self._heads(self.q_proj(queries_from)), cos[first_row:], sin[first_row:])
        k = rotate(self._heads(self.k_proj(normed)), cos, sin)
        visible = torch.ones(length - first_row, length, dtype=torch.bool).tril(first_row)
        attended = F.scaled_dot_product_attention(q, k, self._heads(self.v_proj(normed)), attn_mask=visible)
        x = x + self.attn_out(attended.transpose(1, 2).flatten(2))
        normed = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(normed)) * self.up_proj(normed))


class Guide(DemoModel):
    """The demo model's parts with causal layers: Llama under LLaDA's attribute names."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self.blocks = nn.ModuleList(CausalBlock(settings) for _ in range(settings.n_layers))


LLAMA_NAMES = {
    r"wte\.": "model.embed_tokens.",
    r"blocks\.(\d+)\.attn_norm\.": r"model.layers.\1.input_layernorm.",
    r"blocks\.(\d+)\.([qkv]_proj)\.": r"model.layers.\1.self_attn.\2.",
    r"blocks\.(\d+)\.attn_out\.": r"model.layers.\1.self_attn.o_proj.",
    r"blocks\.(\d+)\.ff_norm\.": r"model.layers.\1.post_attention_layernorm.",
    r"blocks\.(\d+)\.ff_proj\.": r"model.layers.\1.mlp.gate_proj.",
    r"blocks\.(\d+)\.up_proj\.": r"model.layers.\1.mlp.up_proj.",
    r"blocks\.(\d+)\.ff_out\.": r"model.layers.\1.mlp.down_proj.",
    r"ln_f\.": "model.norm.",
    r"ff_out\.": "lm_head.",
}


def llama_name(name: str) -> str:
    """The tensor name of ``LlamaForCausalLM`` for a parameter of ``Guide``."""
    for pattern, replacement in LLAMA_NAMES.items():
        if match := re.match(pattern, name):
            return match.expand(replacement) + name[match.end() :]
    raise ValueError(f"no Llama tensor is known for parameter {name!r}")


# -------------------------------------------------------------------------------------------- structured start

SLOT_WIDTH = 21
CONTEXT = 4
"""Tokens back that the first layer writes beside each token, one per head."""
OUTPUT_SLOT = CONTEXT + 1
CONSTANT_DIM = (CONTEXT + 2) * SLOT_WIDTH
EMBEDDING_NORM = 5.0


@dataclass(frozen=True)
class CopyHead:
    """What a head of a later layer does at first: attend where slots agree, copy one slot from there to the output.

    ``compare`` lists pairs (tokens before the query, tokens before the key) that should be the same.
    """

    compare: tuple[tuple[int, int], ...]
    copied: int = 0


FOLLOWING = tuple(CopyHead(tuple((back, back + 1) for back in range(length))) for length in range(1, 5))
"""Find where the last one to four tokens stood before, and copy what came next."""
PRECEDING = CopyHead(((0, 1),), copied=2)
"""Find where the last token stood before, and copy what came before it there: one step of reversing a list."""
NEXT_ASKED = CopyHead(((0, 1), (4, 2)))
"""After "Ida=07,": find "Ida," and copy what comes next."""
SEPARATOR = CopyHead(((3, 1),))
"""After "Ida=07": find "Ida" and copy what comes next, a comma or the end of the question."""

LATER_HEADS: tuple[tuple[CopyHead, ...], ...] = (
    (FOLLOWING[0], FOLLOWING[1], PRECEDING, NEXT_ASKED),
    (FOLLOWING[2], FOLLOWING[3], PRECEDING, SEPARATOR),
)


@torch.no_grad()
def initialise(model: Guide) -> None:
    """Start the weights as a rough "find the same context, copy what came next" circuit.

    The idea is that of the demo model's start, cut to causal attention: slot 0 of the residual stream holds the token,
    slots 1 to 4 the tokens before it (written by the first layer's heads), and a slot of its own the prediction,
    because slot 0 is never empty here. The output head starts as a copy of the embedding that reads that slot.
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
    model.wte.weight[:, slot(0)] = EMBEDDING_NORM * embedding
    model.wte.weight[:, CONSTANT_DIM] = EMBEDDING_NORM
    model.ff_out.weight[:, slot(OUTPUT_SLOT)] = 2.0 * embedding

    first, *later = blocks
    for head in range(CONTEXT):
        look_back(first, head, head + 1, settings)
        copy_slot(first, head, source=0, target=head + 1, gain=0.35, settings=settings)
    for block, heads in zip(later, LATER_HEADS, strict=True):
        for head, plan in enumerate(heads):
            match_slots(block, head, plan.compare, gain=2.5, settings=settings)
            copy_slot(block, head, source=plan.copied, target=OUTPUT_SLOT, gain=0.3, settings=settings)


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
    """Make a head attend where the given slots of query and key hold the same tokens, in the slowest RoPE pairs."""
    start, half = head * settings.head_dim, settings.head_dim // 2
    slow = [pair + part for pair in range(start + half // 2, start + half) for part in (0, half)]
    for query_slot, key_slot in compare:
        projection = torch.empty(len(slow), SLOT_WIDTH)
        nn.init.orthogonal_(projection)
        block.q_proj.weight[slow, slot(query_slot)] = gain / len(compare) ** 0.5 * projection
        block.k_proj.weight[slow, slot(key_slot)] = gain / len(compare) ** 0.5 * projection


def copy_slot(block: Block, head: int, source: int, target: int, gain: float, settings: ModelSettings) -> None:
    """Make a head write slot ``source`` of the attended position into slot ``target``."""
    start = head * settings.head_dim
    rows = slice(start, start + SLOT_WIDTH)
    block.v_proj.weight[rows, slot(source)] = gain * torch.eye(SLOT_WIDTH)
    block.attn_out.weight[slot(target), rows] = EMBEDDING_NORM * gain * torch.eye(SLOT_WIDTH)


# -------------------------------------------------------------------------------------------------------- loss


def next_token_loss(model: Guide, batch: Batch, settings: TrainingSettings) -> tuple[Tensor, tuple[float, int]]:
    """Mean cross-entropy of the response tokens, each predicted from the true tokens before it.

    End-of-text tokens after the first count ``eos_tail_weight``: a draft fills its canvas with them, so the guide must
    foresee them too. Also returns the sum and count of the cross-entropy over the answers of recall samples, for the
    curriculum.
    """
    first_row = int(batch.prompt_lengths.min()) - 1
    position = torch.arange(first_row + 1, batch.tokens.shape[1])
    in_response = position >= batch.prompt_lengths[:, None]
    hidden = model(batch.tokens[:, :-1], first_row)[in_response]
    targets = batch.tokens[:, first_row + 1 :][in_response]
    token_loss = F.cross_entropy(model.ff_out(hidden), targets, reduction="none")

    in_answer = (position < batch.answer_ends[:, None])[in_response]
    weight = torch.where(in_answer, 1.0, settings.eos_tail_weight)
    recall = in_answer & batch.is_recall[:, None].expand_as(in_response)[in_response]
    loss = (weight * token_loss).sum() / weight.sum()
    return loss, (float(token_loss.detach()[recall].sum()), int(recall.sum()))


# -------------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Score:
    """Greedy predictions under teacher forcing.

    ``tokens`` is the share of right ones over the answers and the end-of-text behind each; ``exact`` the share of
    answers predicted without a mistake, which is also how often greedy generation gives exactly the answer; ``tail``
    the share of right ones among the end-of-text tokens that fill the response after the first.
    """

    tokens: float
    exact: float
    tail: float
    prompt_tokens: float


@torch.inference_mode()
def evaluate(model: Guide, tokenizer: Tokenizer, examples: list[Example]) -> Score:
    right = total = exact = tail_right = tail_total = prompt_tokens = 0
    for example in examples:
        prompt = tokenizer.encode(render_prompt(example.prompt)).ids
        answer = [*tokenizer.encode(" " + example.answer).ids, EOS]
        tail = [EOS] * (GEN_LENGTH - len(answer))
        canvas = torch.tensor([prompt + answer + tail])
        predicted = model.ff_out(model(canvas[:, :-1], len(prompt) - 1)).argmax(dim=-1)
        hits = (predicted == canvas[:, len(prompt) :])[0]
        hits, tail_hits = hits[: len(answer)], hits[len(answer) :]
        right, total, exact = right + int(hits.sum()), total + len(answer), exact + int(hits.all())
        tail_right, tail_total = tail_right + int(tail_hits.sum()), tail_total + len(tail)
        prompt_tokens += len(prompt)
    return Score(right / total, exact / len(examples), tail_right / tail_total, prompt_tokens / len(examples))


def held_out(task: str, count: int, pairs: int | None = None, filler: float = 0.0) -> list[Example]:
    """Evaluation examples: of ``pairs`` pairs or words, or of 2 up to the longest trained."""
    return make_examples(task, count, seed=0, min_pairs=pairs, max_pairs=pairs, filler=filler)


# ------------------------------------------------------------------------------------------- checkpoint folder


def save_checkpoint(model: Guide, out: Path) -> None:
    """Write weights (bf16) and config in Llama's layout, and copy the demo model's tokenizer files."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {llama_name(name): p.detach().bfloat16() for name, p in model.named_parameters()}
    (out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    settings = model.settings
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": settings.d_model,
        "intermediate_size": settings.mlp_hidden_size,
        "num_hidden_layers": settings.n_layers,
        "num_attention_heads": settings.n_heads,
        "num_key_value_heads": settings.n_heads,
        "head_dim": settings.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": settings.rms_norm_eps,
        "rope_theta": settings.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "torch_dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_MODEL_DIR / name, out / name)


MODEL_CARD = """\
---
license: apache-2.0
pipeline_tag: text-generation
tags: [llama, guided-diffusion, demo]
---
# dllm-engine demo guide

A causal language model of {parameters:.2f} million parameters in Llama's architecture ({layers} layers, width \
{width}). It is the guide for the demo model: it shares that model's tokenizer, prompt format and tasks, and checks \
its drafts in Guided Diffusion. It loads as a plain `LlamaForCausalLM`.

## Data
The samples of `dllm_engine/demo/tasks.py` as the demo model's training draws them, from another seed: prompt, \
answer, end-of-text tokens up to the end of the canvas. Evaluation uses seeds that training does not; only the chat \
task is a fixed list of lines and the same in both.

## Training
`python examples/train_demo_guide.py --out DIR` on one CPU thread: {steps} steps of about {batch_tokens} tokens, seed \
{seed}; {minutes:.0f} minutes in the run that gave these weights. Teacher forcing with the loss on response tokens \
only; end-of-text tokens after the first count {tail_weight}. Muon ({muon_lr}) trains the matrices inside the layers, \
AdamW ({adam_lr}) the rest. The weights start as a rough "find the same context, copy what came next" circuit (see \
`initialise` in the script).

## Figures
{count} examples each, these weights in float32, greedy predictions given the true tokens before. *Tokens*: share of \
right predictions over the answer and the end-of-text behind it. *Exact*: share of answers without a wrong one, which \
is how often greedy generation gives exactly the answer. *Tail*: share of right predictions after the first \
end-of-text, up to {gen_length} response tokens.

| task | pairs or words | filler | mean prompt tokens | tokens | exact | tail |
|---|---|---|---|---|---|---|
{table}

## Limits
Those of the demo model: only the task formats above work, with prompts of up to about 250 tokens.

Licence: Apache-2.0.
"""


def write_model_card(
    model: Guide, tokenizer: Tokenizer, settings: TrainingSettings, out: Path, count: int, minutes: float
) -> None:
    """Evaluate every task on ``count`` examples per row and write README.md."""
    mixed = [(task, None, 0.0) for task in TASK_WEIGHTS]
    fixed = [(each.task, each.pairs, each.filler) for each in CARD_EVALUATIONS if each.pairs and not each.threshold]
    rows = []
    for task, pairs, filler in mixed + fixed:
        score = evaluate(model, tokenizer, held_out(task, count, pairs, filler))
        size = pairs or (f"2 to {MAX_PAIRS[task]}" if task in MAX_PAIRS else "-")
        shares = (f"{share:.3f}" for share in (score.tokens, score.exact, score.tail))
        cells = (task, size, f"{filler:.0%}", f"{score.prompt_tokens:.0f}", *shares)
        rows.append("| " + " | ".join(map(str, cells)) + " |")
        print(rows[-1], flush=True)
    card = MODEL_CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        layers=model.settings.n_layers,
        width=model.settings.d_model,
        steps=settings.steps,
        batch_tokens=settings.batch_tokens,
        seed=settings.seed,
        minutes=minutes,
        tail_weight=settings.eos_tail_weight,
        muon_lr=settings.muon_lr,
        adam_lr=settings.adam_lr,
        count=count,
        gen_length=GEN_LENGTH,
        table="\n".join(rows),
    )
    (out / "README.md").write_text(card)


# ------------------------------------------------------------------------------------------------ training loop


def train(model: Guide, tokenizer: Tokenizer, settings: TrainingSettings) -> float:
    """Train ``model`` in place, printing progress; returns the minutes it took."""
    stream = SampleStream(tokenizer, settings)
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

    for step, batch in zip(range(1, settings.steps + 1), stream, strict=False):
        loss, recall = next_token_loss(model, batch, settings)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()

        loss_mean.add(float(loss.detach()), 1)
        recall_mean.add(*recall)
        if recall_mean.steps >= 100 and recall_mean.value < settings.curriculum_loss:
            stream.max_pairs = next(stages, stream.max_pairs)
            recall_mean = Average()
        if step % 100 == 0:
            print(
                f"step {step:5d}  {(time.perf_counter() - started) / 60:5.1f} min  loss {loss_mean.value:.3f}  "
                f"recall loss {recall_mean.value:.3f}  pairs up to {stream.max_pairs}",
                flush=True,
            )
        if step % settings.evaluate_every == 0:
            scores = [
                f"{task} x{pairs} {evaluate(model, tokenizer, held_out(task, 32, pairs)).tokens:.2f}"
                for task, pairs in PROGRESS_TASKS
            ]
            print("  tokens:", "  ".join(scores), flush=True)
    return (time.perf_counter() - started) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo_guide"), help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=TRAINING.steps, help="training steps")
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that everything runs")
    arguments = parser.parse_args()

    steps = 40 if arguments.quick else arguments.steps
    settings = replace(TRAINING, steps=steps, evaluate_every=min(TRAINING.evaluate_every, max(1, steps // 2)))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    model = Guide(GUIDE)
    initialise(model)
    minutes = train(model, tokenizer, settings)

    round_to_bfloat16(model)
    save_checkpoint(model, arguments.out)
    write_model_card(model, tokenizer, settings, arguments.out, count=2 if arguments.quick else 200, minutes=minutes)


if __name__ == "__main__":
    main()
