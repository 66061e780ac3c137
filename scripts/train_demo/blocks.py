"""The demo model of the block diffusion kind: SDAR's architecture, the demo model's tasks and tokenizer.

Training feeds each canvas twice in one pass, as BD3-LM and SDAR do: clean, and with masks in every block of the
response. A block with masks learns from the clean blocks before it.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from dllm_engine.demo import DEMO_MODEL_DIR

from .checkpoint import Evaluation, copy_from_demo, llama_config, llama_name, save_checkpoint, write_model_card
from .model import evaluated, print_progress
from .network import BlockModel, ModelSettings
from .samples import BLOCK_LENGTH, MASK, TASK_WEIGHTS, Batch, SampleStream
from .training import Loss, TrainingSettings, round_to_bfloat16, train

SHAPE = ModelSettings(n_layers=4, n_heads=8, n_kv_heads=4, qk_norm=True)
TRAINING = TrainingSettings(
    steps=400,
    seed=2,  # other samples than the demo model saw
    eos_tail_weight=0.1,
    curriculum=(40,),
    muon_lr=0.003,
    adam_lr=2e-3,
    progress_every=200,
    card_examples=40,
)
HEAD_NORM = 2.0
"""First weights of the norms of queries and keys: about the scale that these have in the demo model."""
MIN_MASK_RATIO = 0.05


def run(out: Path, settings: TrainingSettings) -> None:
    """Train the model and write its checkpoint folder."""
    torch.manual_seed(settings.seed)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    model = BlockModel(SHAPE)
    start_from_demo(model)
    generator = torch.Generator().manual_seed(settings.seed)

    def show_progress() -> None:
        print_progress(model, tokenizer)
        save(model, out)

    stream = SampleStream(tokenizer, settings.seed, settings.curriculum[0], long_response_share=0.0)
    train(model, stream, settings, lambda batch: block_loss(model, batch, generator, settings), show_progress)
    round_to_bfloat16(model)
    save(model, out)
    evaluations = [Evaluation(task, threshold=threshold) for threshold in (None, 0.9) for task in TASK_WEIGHTS]
    rows = evaluated(model, tokenizer, evaluations, settings.card_examples)
    write_model_card("blocks_card.md", model, settings, rows, out)


@torch.no_grad()
def start_from_demo(model: BlockModel) -> None:
    """Set the weights of ``model`` to those of the demo model, which has the same layers up to what SDAR adds.

    Its heads become the first query head of each group; the other query heads start as noise.
    """
    settings, demo = model.settings, load_file(DEMO_MODEL_DIR / "model.safetensors")
    heads = torch.arange(settings.n_heads * settings.head_dim).view(settings.n_kv_heads, -1, settings.head_dim)
    first = heads[:, 0].flatten()
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            parameter.fill_(HEAD_NORM)
            continue
        start = demo[f"model.transformer.{name}"].float()
        if "q_proj" in name:
            parameter.normal_(std=0.01)[first] = start
        elif "attn_out" in name:
            parameter.normal_(std=0.01)[:, first] = start
        else:
            parameter.copy_(start)


def block_loss(model: BlockModel, batch: Batch, generator: torch.Generator, settings: TrainingSettings) -> Loss:
    """Cross-entropy of hidden tokens, where every block of every response has a mask ratio of its own.

    A block's tokens count by how many of it were hidden. Blocks behind the longest answer of the batch are left out:
    decoding ends before them.
    """
    size = len(batch.tokens)
    first_row = model.first_block(int(batch.prompt_lengths.min()))
    end = -(-int(batch.answer_ends.max()) // BLOCK_LENGTH) * BLOCK_LENGTH
    clean, positions = batch.tokens[:, :end], torch.arange(first_row, end)

    shape = (size, len(positions) // BLOCK_LENGTH)
    strata = torch.randperm(shape[0] * shape[1], generator=generator) + torch.rand(1, generator=generator)
    ratio = (strata / len(strata)).clamp(min=MIN_MASK_RATIO).view(shape).repeat_interleave(BLOCK_LENGTH, dim=1)
    noise = torch.rand(ratio.shape, generator=generator)
    masked = (positions >= batch.prompt_lengths[:, None]) & (noise < ratio)

    noisy = clean.clone()
    noisy[:, first_row:][masked] = MASK
    hidden = model.denoise(clean, noisy, first_row)[masked]
    token_loss = F.cross_entropy(model.ff_out(hidden), clean[:, first_row:][masked], reduction="none")

    in_answer = (positions < batch.answer_ends[:, None])[masked]
    num_hidden = masked.view(size, -1, BLOCK_LENGTH).sum(dim=-1).repeat_interleave(BLOCK_LENGTH, dim=1)[masked]
    weight = torch.where(in_answer, 1.0, settings.eos_tail_weight) / num_hidden
    recall = in_answer & batch.is_recall[:, None].expand_as(masked)[masked]
    loss: Tensor = (weight * token_loss).sum() / weight.sum()
    return loss, (float(token_loss.detach()[recall].sum()), int(recall.sum()))


# Checkpoint folder


def save(model: BlockModel, out: Path) -> None:
    """Write weights and config in SDAR's layout; the other files are the demo model's."""
    config = {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        **llama_config(model.settings),
        "block_size": BLOCK_LENGTH,
        "mask_token_id": MASK,
    }
    save_checkpoint(model, llama_name, {"config": config}, out)
    copy_from_demo(out, "generation_config.json", "tokenizer.json", "tokenizer_config.json")
