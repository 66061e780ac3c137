"""The three models: what each starts from, what it is trained to predict, and the files
that it is saved in.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Generator, Tensor

from dllm_engine.demo import DEMO_BLOCKS_DIR, DEMO_GUIDE_DIR, DEMO_MODEL_DIR

from .circuit import DEMO_CIRCUIT, GUIDE_CIRCUIT
from .network import HEAD_DIM, N_KV_HEADS, BlockModel, DemoModel, Guide, ModelSettings
from .samples import (
    BLOCK_LENGTH,
    GEN_LENGTH,
    MASK,
    Batch,
    Mix,
    SampleStream,
    train_tokenizer,
)
from .training import Loss, train

MIN_MASK_RATIO = 0.05
BLOCK_MASKED_SHARE = 0.4
"""Share of samples masked the way block decoding meets them."""
HEAD_NORM = 2.0
"""First weights of the norms of queries and keys: about the scale that these have in
the demo model.
"""
LLAMA_NAMES = {
    "wte": "model.embed_tokens",
    "ln_f": "model.norm",
    "ff_out": "lm_head",
    "blocks.attn_norm": "input_layernorm",
    "blocks.attn_out": "self_attn.o_proj",
    "blocks.ff_norm": "post_attention_layernorm",
    "blocks.ff_proj": "mlp.gate_proj",
    "blocks.up_proj": "mlp.up_proj",
    "blocks.ff_out": "mlp.down_proj",
}
"""Modules of Llama and SDAR; those of a layer that are not here have LLaDA's names, in
``self_attn``.
"""


def llada_name(name: str) -> str:
    return f"model.transformer.{name}"


def llama_name(name: str) -> str:
    """The tensor name of Llama and SDAR for a parameter of the network."""
    *layer, module, kind = name.split(".")
    if not layer:
        return f"{LLAMA_NAMES[module]}.{kind}"
    return f"model.layers.{layer[1]}.{LLAMA_NAMES.get(f'blocks.{module}', f'self_attn.{module}')}.{kind}"


# Losses


def answer_loss(
    model: DemoModel,
    hidden: Tensor,
    batch: Batch,
    positions: Tensor,
    chosen: Tensor,
    *,
    tail_weight: float,
    num_hidden: Tensor | int = 1,
    total: int | None = None,
) -> Loss:
    """Weighted mean of the cross-entropy of tokens.

    Args:
        hidden: Hidden states that predict them, [tokens, d_model].
        positions: Canvas positions, [positions].
        chosen: The tokens: bool [batch, positions].
        tail_weight: Weight of end-of-text tokens after the first.
        num_hidden: Each token's weight is divided by it, [tokens].
        total: What the sum is divided by; None: the sum of the weights.
    """
    token_loss = F.cross_entropy(
        model.ff_out(hidden), batch.tokens[:, positions][chosen], reduction="none"
    )
    in_answer = (positions < batch.answer_ends[:, None])[chosen]
    weight = torch.where(in_answer, 1.0, tail_weight) / num_hidden
    recall = in_answer & batch.is_recall[:, None].expand_as(chosen)[chosen]
    loss: Tensor = (weight * token_loss).sum() / (
        weight.sum() if total is None else total
    )
    return loss, (float(token_loss.detach()[recall].sum()), int(recall.sum()))


def draw_ratios(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Mask ratios, uniform and stratified over the batch."""
    size = torch.Size(shape).numel()
    strata = torch.randperm(size, generator=generator) + torch.rand(
        1, generator=generator
    )
    return (strata / size).clamp(min=MIN_MASK_RATIO).view(shape)


def draw_masks(batch: Batch, generator: Generator) -> Tensor:
    """Choose the response tokens to hide, bool [batch, length]; at least one per
    sample.

    In ``BLOCK_MASKED_SHARE`` of the samples a random block is masked with the sample's
    ratio, everything before it is clean and everything after it masked.
    """
    size, length = batch.tokens.shape
    ratio = draw_ratios((size, 1), generator)
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
    return torch.where(
        batch.is_decided.any(dim=1, keepdim=True), batch.is_decided, masked
    )


def masked_loss(
    model: DemoModel, batch: Batch, generator: Generator, tail_weight: float
) -> Loss:
    """Cross-entropy of the hidden tokens, averaged per sample by how many were hidden,
    then over the batch.

    Dividing by the number hidden does what the 1/t of the diffusion objective does,
    with less variance.
    """
    masked = draw_masks(batch, generator)
    first_row = int(batch.prompt_lengths.min())
    hidden = model(batch.tokens.masked_fill(masked, MASK), first_row)
    masked = masked[:, first_row:]
    return answer_loss(
        model,
        hidden[masked],
        batch,
        torch.arange(first_row, batch.tokens.shape[1]),
        masked,
        tail_weight=tail_weight,
        num_hidden=masked.sum(dim=1, keepdim=True).expand_as(masked)[masked],
        total=len(masked),
    )


def block_loss(
    model: BlockModel, batch: Batch, generator: Generator, tail_weight: float
) -> Loss:
    """Cross-entropy of hidden tokens, where every block of every response has a mask
    ratio of its own.

    Each canvas goes through twice in one pass, as in BD3-LM and SDAR: clean, and with
    masks. A block's tokens count by how many of it were hidden. Blocks behind the
    longest answer of the batch are left out: decoding ends before them.
    """
    first_row = int(batch.prompt_lengths.min()) // BLOCK_LENGTH * BLOCK_LENGTH
    end = -(-int(batch.answer_ends.max()) // BLOCK_LENGTH) * BLOCK_LENGTH
    clean, positions = batch.tokens[:, :end], torch.arange(first_row, end)

    ratio = draw_ratios(
        (len(clean), len(positions) // BLOCK_LENGTH), generator
    ).repeat_interleave(BLOCK_LENGTH, dim=1)
    noise = torch.rand(ratio.shape, generator=generator)
    masked = (positions >= batch.prompt_lengths[:, None]) & (noise < ratio)

    noisy = clean.clone()
    noisy[:, first_row:][masked] = MASK
    hidden = model.denoise(clean, noisy, first_row)[masked]
    num_hidden = (
        masked.unflatten(1, (-1, BLOCK_LENGTH))
        .sum(dim=-1)
        .repeat_interleave(BLOCK_LENGTH, dim=1)[masked]
    )
    return answer_loss(
        model,
        hidden,
        batch,
        positions,
        masked,
        tail_weight=tail_weight,
        num_hidden=num_hidden,
    )


def next_token_loss(
    model: Guide, batch: Batch, generator: Generator, tail_weight: float
) -> Loss:
    """Mean cross-entropy of the response tokens, each predicted from the true tokens
    before it.

    End-of-text tokens after the first count little, but count: a draft fills its canvas
    with them, so the guide must foresee them too.
    """
    first_row = int(batch.prompt_lengths.min()) - 1
    positions = torch.arange(first_row + 1, batch.tokens.shape[1])
    in_response = positions >= batch.prompt_lengths[:, None]
    hidden = model(batch.tokens[:, :-1], first_row)[in_response]
    return answer_loss(
        model, hidden, batch, positions, in_response, tail_weight=tail_weight
    )


# Recipes


@torch.no_grad()
def load(model: DemoModel, folder: Path, tensor_name: Callable[[str], str]) -> None:
    """Set the weights of ``model`` to those of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[tensor_name(name)].float())


@torch.no_grad()
def start_from_demo(model: DemoModel) -> None:
    """Set the weights of ``model`` to those of the demo model, which has the same
    layers up to what SDAR adds.

    Its heads become the first query head of each group; the other query heads start as
    noise.
    """
    demo = load_file(DEMO_MODEL_DIR / "model.safetensors")
    query_rows = torch.arange(model.settings.n_heads * HEAD_DIM)
    first = query_rows.view(N_KV_HEADS, -1, HEAD_DIM)[:, 0].flatten()
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            parameter.fill_(HEAD_NORM)
            continue
        start = demo[llada_name(name)].float()
        if "q_proj" in name:
            parameter.normal_(std=0.01)[first] = start
        elif "attn_out" in name:
            parameter.normal_(std=0.01)[:, first] = start
        else:
            parameter.copy_(start)


@dataclass(frozen=True)
class Recipe:
    """What decides how the weights of a model come out."""

    shipped: Path
    network: Callable[[ModelSettings], Any]
    shape: ModelSettings
    start: Callable[[DemoModel], None] | None
    """None: the weights that the recipe ``before`` has written."""
    loss: Callable[[Any, Batch, Generator, float], Loss]
    tensor_name: Callable[[str], str]
    steps: int
    seed: int
    """Other models see other samples than the demo model saw."""
    tail_weight: float = 0.1
    """Weight in the loss of end-of-text tokens after the first."""
    stages: tuple[int, ...] = (6, 16, 40)
    """Largest number of pairs per stage; the next stage starts once the recall loss is
    low enough.
    """
    stage_loss: float = 0.0
    muon_lr: float = 0.005
    adam_lr: float = 3e-3
    mix: Mix = field(default_factory=Mix)
    before: "Recipe | None" = None
    """Runs first."""

    def with_steps(self, steps: int) -> "Recipe":
        """The same with other numbers of steps, also of what runs before."""
        before = self.before and self.before.with_steps(steps)
        return replace(self, steps=steps, before=before)

    def run(self, out: Path) -> None:
        """Train the model and write its checkpoint folder."""
        if self.before is not None:
            self.before.run(out)
        else:
            self._write_files(out)
        torch.manual_seed(self.seed)
        tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
        model = self.network(self.shape)
        if self.start is None:
            load(model, out, self.tensor_name)
        else:
            self.start(model)
        generator = Generator().manual_seed(self.seed)
        train(
            model,
            SampleStream(tokenizer, self.seed, self.stages[0], self.mix),
            lambda batch: self.loss(model, batch, generator, self.tail_weight),
            steps=self.steps,
            muon_lr=self.muon_lr,
            adam_lr=self.adam_lr,
            stages=self.stages[1:],
            stage_loss=self.stage_loss,
        )
        tensors = {
            self.tensor_name(name): p.detach().bfloat16()
            for name, p in model.named_parameters()
        }
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})

    def _write_files(self, out: Path) -> None:
        """Write what a checkpoint folder has beside its weights."""
        out.mkdir(parents=True, exist_ok=True)
        for file in self.shipped.glob("*.json"):
            shutil.copyfile(file, out / file.name)
        if self.shipped == DEMO_MODEL_DIR:
            train_tokenizer(self.seed).save(str(out / "tokenizer.json"))


TASKS = Recipe(
    shipped=DEMO_MODEL_DIR,
    network=DemoModel,
    shape=ModelSettings(n_layers=4),
    start=DEMO_CIRCUIT.initialise,
    loss=masked_loss,
    tensor_name=llada_name,
    steps=7000,
    seed=0,
    tail_weight=0.3,
    stage_loss=0.55,
)
"""The demo model before it learns questions."""
QUESTIONS = replace(
    TASKS,
    before=TASKS,
    start=None,
    steps=7000,
    seed=3,
    stages=(40,),
    muon_lr=0.004,
    adam_lr=2.5e-3,
    mix=Mix(questions=0.5, batch_tokens=1024),
)
"""Learns questions, and forgets some of what it knew of lists."""
RECIPES = {
    "model": replace(
        QUESTIONS,
        before=QUESTIONS,
        steps=4500,
        seed=4,
        muon_lr=0.003,
        adam_lr=2e-3,
        mix=Mix(questions=0.4, lists=3.0, chats=0.25, batch_tokens=1024),
    ),
    "blocks": Recipe(
        shipped=DEMO_BLOCKS_DIR,
        network=BlockModel,
        shape=ModelSettings(n_layers=4, n_heads=8, qk_norm=True),
        start=start_from_demo,
        loss=block_loss,
        tensor_name=llama_name,
        steps=400,
        seed=2,
        stages=(40,),
        muon_lr=0.003,
        adam_lr=2e-3,
        mix=Mix(long_responses=0.0),
    ),
    "guide": Recipe(
        shipped=DEMO_GUIDE_DIR,
        network=Guide,
        shape=ModelSettings(n_layers=3),
        start=GUIDE_CIRCUIT.initialise,
        loss=next_token_loss,
        tensor_name=llama_name,
        steps=3000,
        seed=1,
        # Names and signs of an answer are easy to foresee, so the mean is lower than
        # for masks.
        stage_loss=0.35,
    ),
}
