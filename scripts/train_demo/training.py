"""The training loop and its optimizer, the same for all models."""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .network import DemoModel
from .samples import Batch, SampleStream

WARMUP_STEPS = 50

Loss = tuple[Tensor, tuple[float, int]]
"""The loss, and sum and count of the cross-entropy over the answers of recall samples, for the curriculum."""


@dataclass(frozen=True)
class TrainingSettings:
    """What decides how the weights come out, apart from the network, the samples and the loss."""

    steps: int
    seed: int
    eos_tail_weight: float
    """Weight in the loss of end-of-text tokens after the first."""
    curriculum: tuple[int, ...] = (6, 16, 40)
    """Largest number of pairs per stage; the next stage starts once the recall loss is low enough."""
    curriculum_loss: float = 0.0
    """Recall loss below which the next stage starts."""
    muon_lr: float = 0.005
    adam_lr: float = 3e-3
    progress_every: int = 1000
    """Steps between evaluations."""
    card_examples: int = 200
    """Held-out examples per row of the model card."""

    def quick(self) -> "TrainingSettings":
        """A few steps only, to see that everything runs."""
        return replace(self, steps=40, progress_every=20, card_examples=2)


def train(
    model: DemoModel,
    stream: SampleStream,
    settings: TrainingSettings,
    loss_of: Callable[[Batch], Loss],
    show_progress: Callable[[], None],
) -> float:
    """Train ``model`` in place; returns the minutes it took.

    Prints the loss every 100 steps and calls ``show_progress`` every ``progress_every``.
    """
    steps = settings.steps
    matrices = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        Muon(matrices, lr=settings.muon_lr),
        torch.optim.AdamW(others, lr=settings.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1 - step / steps))
        for optimizer in optimizers
    ]
    loss_mean, recall_mean = FadingMean(), FadingMean()
    stages = iter(settings.curriculum[1:])
    started = time.perf_counter()
    for step, batch in zip(range(1, steps + 1), stream, strict=False):
        loss, recall = loss_of(batch)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()

        loss_mean.add(float(loss.detach()), 1)
        recall_mean.add(*recall)
        if recall_mean.steps >= 100 and recall_mean.value < settings.curriculum_loss:
            stream.max_pairs = next(stages, stream.max_pairs)
            recall_mean = FadingMean()
        if step % 100 == 0:
            print(
                f"step {step:5d}  {(time.perf_counter() - started) / 60:5.1f} min  loss {loss_mean.value:.3f}  "
                f"recall loss {recall_mean.value:.3f}  pairs up to {stream.max_pairs}",
                flush=True,
            )
        if step % settings.progress_every == 0:
            show_progress()
    return (time.perf_counter() - started) / 60


class FadingMean:
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


@torch.no_grad()
def round_to_bfloat16(model: DemoModel) -> None:
    """Round the weights to what the checkpoint stores, so that the figures are those of the shipped weights."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
