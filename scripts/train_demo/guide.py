"""The demo guide: a small causal Llama that checks the demo model's drafts.

Guided Diffusion needs an autoregressive model that shares the diffusion model's tokenizer and knows the same tasks.
This one learns by teacher forcing on samples of the same tasks: prompt, answer, end-of-text up to the end of the
canvas. Its checkpoint folder has the layout of Hugging Face's ``LlamaForCausalLM``.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from dllm_engine.demo import DEMO_MODEL_DIR
from dllm_engine.demo.tasks import MAX_PAIRS

from .checkpoint import (
    CARD_ROWS,
    PROGRESS_EXAMPLES,
    PROGRESS_ROWS,
    Evaluation,
    copy_from_demo,
    llama_config,
    llama_name,
    save_checkpoint,
    table_row,
    write_model_card,
)
from .circuit import CONTEXT, Circuit, CopyHead
from .network import Guide, ModelSettings
from .samples import EOS, GEN_LENGTH, TASK_WEIGHTS, Batch, SampleStream, render_prompt
from .training import Loss, TrainingSettings, round_to_bfloat16, train

SHAPE = ModelSettings(n_layers=3)
TRAINING = TrainingSettings(
    steps=3000,
    seed=1,  # other samples than the demo model saw
    eos_tail_weight=0.1,
    curriculum_loss=0.35,  # names and signs of an answer are easy to foresee, so the mean is lower than for masks
)

FOLLOWING = tuple(CopyHead(tuple((back, back + 1) for back in range(length))) for length in range(1, 5))
"""Find where the last one to four tokens stood before, and copy what came next."""
PRECEDING = CopyHead(((0, 1),), copied=2)
"""Find where the last token stood before, and copy what came before it there: one step of reversing a list."""
NEXT_ASKED = CopyHead(((0, 1), (4, 2)))
"""After "Ida=07,": find "Ida," and copy what comes next."""
SEPARATOR = CopyHead(((3, 1),))
"""After "Ida=07": find "Ida" and copy what comes next, a comma or the end of the question."""
CIRCUIT = Circuit(
    slot_width=21,
    output_slot=CONTEXT + 1,  # a slot of its own: slot 0 is never empty here
    later_heads=(
        (FOLLOWING[0], FOLLOWING[1], PRECEDING, NEXT_ASKED),
        (FOLLOWING[2], FOLLOWING[3], PRECEDING, SEPARATOR),
    ),
    marks_masks=False,
)


def run(out: Path, settings: TrainingSettings) -> None:
    """Train the guide and write its checkpoint folder."""
    torch.manual_seed(settings.seed)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    model = Guide(SHAPE)
    CIRCUIT.initialise(model)

    def show_progress() -> None:
        scores = [(row, evaluate(model, tokenizer, row, PROGRESS_EXAMPLES)) for row in PROGRESS_ROWS]
        print("  tokens:", *(f"{row.task} x{row.pairs} {score.tokens:.2f}" for row, score in scores), flush=True)

    stream = SampleStream(tokenizer, settings.seed, settings.curriculum[0])
    minutes = train(model, stream, settings, lambda batch: next_token_loss(model, batch, settings), show_progress)
    round_to_bfloat16(model)
    save(model, out)
    rows = table(model, tokenizer, settings.card_examples)
    write_model_card("guide_card.md", model, settings, rows, out, minutes=minutes)


def next_token_loss(model: Guide, batch: Batch, settings: TrainingSettings) -> Loss:
    """Mean cross-entropy of the response tokens, each predicted from the true tokens before it.

    End-of-text tokens after the first count ``eos_tail_weight``: a draft fills its canvas with them, so the guide must
    foresee them too.
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
    loss: Tensor = (weight * token_loss).sum() / weight.sum()
    return loss, (float(token_loss.detach()[recall].sum()), int(recall.sum()))


# Evaluation


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
def evaluate(model: Guide, tokenizer: Tokenizer, row: Evaluation, count: int) -> Score:
    """Predict ``count`` held-out examples."""
    right = total = exact = tail_right = tail_total = prompt_tokens = 0
    for example in row.examples(count):
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
    return Score(right / total, exact / count, tail_right / tail_total, prompt_tokens / count)


# Checkpoint folder


def save(model: Guide, out: Path) -> None:
    """Write weights and config in Llama's layout, and copy the demo model's tokenizer files."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "mlp_bias": False,
        **llama_config(model.settings),
    }
    save_checkpoint(model, llama_name, {"config": config}, out)
    copy_from_demo(out, "tokenizer.json", "tokenizer_config.json")


def table(model: Guide, tokenizer: Tokenizer, count: int) -> list[str]:
    """The rows of the model card's table."""
    rows = []
    for row in [*(Evaluation(task) for task in TASK_WEIGHTS), *CARD_ROWS]:
        score = evaluate(model, tokenizer, row, count)
        size = row.pairs or (f"2 to {MAX_PAIRS[row.task]}" if row.task in MAX_PAIRS else "-")
        shares = (f"{share:.3f}" for share in (score.tokens, score.exact, score.tail))
        rows.append(table_row((row.task, size, f"{row.filler:.0%}", f"{score.prompt_tokens:.0f}", *shares)))
    return rows
