"""The training loop and its optimizer, the same for all models."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .network import DemoModel
from .samples import Batch, SampleStream

WARMUP_STEPS = 50

Loss = tuple[Tensor, tuple[float, int]]
"""The loss, and sum and count of the cross-entropy over the answers of recall samples,
for the curriculum.
"""


def train(
    model: DemoModel,
    stream: SampleStream,
    loss_of: Callable[[Batch], Loss],
    *,
    steps: int,
    muon_lr: float,
    adam_lr: float,
    stages: Sequence[int],
    stage_loss: float,
) -> None:
    """Train ``model`` in place. The stream's prompts grow to the next of ``stages``
    once the recall loss is below ``stage_loss``."""
    matrices = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
    others = [
        p for p in model.parameters() if all(p is not matrix for matrix in matrices)
    ]
    optimizers = [
        Muon(matrices, lr=muon_lr),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1 - step / steps)
        )
        for optimizer in optimizers
    ]
    loss_mean, recall_mean, left = FadingMean(), FadingMean(), iter(stages)
    for step, batch in zip(range(1, steps + 1), stream, strict=False):
        loss, recall = loss_of(batch)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()

        loss_mean.add(float(loss.detach()), 1)
        recall_mean.add(*recall)
        if recall_mean.steps >= 100 and recall_mean.value < stage_loss:
            stream.max_pairs = next(left, stream.max_pairs)
            recall_mean = FadingMean()
        if step % 100 == 0:
            means = f"loss {loss_mean.value:.3f}  recall loss {recall_mean.value:.3f}"
            print(
                f"step {step:5d}  {means}  pairs up to {stream.max_pairs}", flush=True
            )


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
    """Momentum whose update of each matrix is replaced by the nearest orthogonal matrix
    (Jordan et al., 2024).

    Matrices of one shape (up to transposition) are orthogonalised together, which costs
    far less on a CPU.
    """

    MOMENTUM = 0.95

    def __init__(self, matrices: list[nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # takes no closure
        (group,) = self.param_groups
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            by_shape[tuple(sorted(parameter.shape))].append(parameter)
        for parameters in by_shape.values():
            updates = [self._update(parameter) for parameter in parameters]
            wide = orthogonalise(
                torch.stack([u if u.shape[0] <= u.shape[1] else u.mT for u in updates])
            )
            for parameter, new in zip(parameters, wide, strict=True):
                rows, columns = parameter.shape
                scale = max(1.0, rows / columns) ** 0.5
                parameter.add_(
                    new if rows <= columns else new.mT, alpha=-group["lr"] * scale
                )

    def _update(self, parameter: nn.Parameter) -> Tensor:
        """The gradient with its momentum, as of Nesterov."""
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        velocity = state.setdefault("velocity", torch.zeros_like(parameter))
        velocity.lerp_(gradient, 1 - self.MOMENTUM)
        return gradient.lerp(velocity, self.MOMENTUM)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Push the singular values of ``matrices`` [count, rows <= columns] towards 1 by a
    quintic Newton-Schulz.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
