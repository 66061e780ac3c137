"""FOCUS (arXiv 2601.23278) as slow, plain PyTorch: block diffusion whose passes drop,
after two layers, masked rows that they expect not to decode, and feed decided rows once
more and then no longer.
"""

import math
import statistics

import torch

from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding


class PlainFocus:
    def __init__(
        self,
        run: Decoding,
        *,
        alpha: float = 1.5,
        keep: int = 1,
        select: str = "dynamic",
        first_keep: str = "carry",
        deviation: str = "sample",
    ) -> None:
        self.run, self.model, self.buffer = run, run.model, Buffer(run)
        self.alpha, self.keep, self.select = alpha, keep, select
        self.first_keep = first_keep
        self.deviation = (
            statistics.stdev if deviation == "sample" else statistics.pstdev
        )
        self.processed: set[int] = set()
        """Positions of the block that went through all layers."""
        run.fills_computed = True
        run.traces["selected_positions"] = []

    def decode(self) -> None:
        run, stored = self.run, 0
        for step in run.passes():
            start, stop = run.attended
            masked = run.masked(start, stop)
            finished = range(0)
            if step == 0:
                finished = range(stored, start)
                self.buffer.store(stored, start)
                stored, fed = start, list(range(start, stop))
                self.processed = set()
                filled: list[int] = []
                if self.first_keep == "alpha" and self.alpha > 0:
                    self.keep = math.ceil(self.alpha)
            logits = self.forward(fed, masked)
            run.fill(logits, [*finished, *fed])
            filled.append(len(run.order[-1]))
            if self.alpha > 0:
                self.keep = math.ceil(self.alpha * statistics.mean(filled))
            known = {*range(start, stop)} - {*masked}
            fed = [
                row
                for row in fed
                if not (row in known and (row + 1 == stop or row + 1 in known))
            ]

    def forward(self, rows: list[int], masked: list[int]) -> torch.Tensor:
        """Logits of the rows that reach the last layer."""
        x = self.model.embed(self.run.canvas)[rows]
        importance = torch.zeros(0)
        evicts = self.select != "none" and len(masked) > self.keep
        read = rows[-1] + 1
        for number, layer in enumerate(self.model.layers):
            q, k, v = self.model.qkv(layer, x, rows)
            self.buffer.k[number, rows], self.buffer.v[number, rows] = k, v
            if number < 2 and evicts:
                before = importance
                importance = self.importance(q, k, rows, masked)
            if number == 1 and evicts:
                kept = self.kept(masked, (importance - before).tolist())
                own = [i for i, row in enumerate(rows) if row in kept]
                own += [i for i, row in enumerate(rows) if row not in masked]
                own.sort()
                x, q, rows = x[own], q[own], [rows[i] for i in own]
            x = x + self.model.attention(
                layer, q, self.buffer.k[number, :read], self.buffer.v[number, :read]
            )
            x = x + self.model.mlp(layer, x)
            if number == 1:
                read = rows[-1] + 1
        self.processed |= {*rows}
        self.run.traces["selected_positions"].append([rows])
        return self.buffer.logits(x, rows)

    def importance(
        self, q: torch.Tensor, k: torch.Tensor, rows: list[int], masked: list[int]
    ) -> torch.Tensor:
        """Of each masked row: the attention that it gets from all masked rows."""
        own = [rows.index(position) for position in masked]
        total = torch.zeros(len(masked))
        for head in range(q.shape[1]):
            keys = k[own, head * k.shape[1] // q.shape[1]]
            scores = q[own, head] @ keys.T / math.sqrt(q.shape[-1])
            # The best of each key and its neighbours among the masked ones.
            near = torch.stack(
                [
                    scores[:, max(i - 1, 0) : i + 2].max(dim=-1).values
                    for i in range(len(masked))
                ],
                dim=-1,
            )
            total += near.softmax(-1).sum(0)
        return total

    def kept(self, masked: list[int], deltas: list[float]) -> set[int]:
        outlier = statistics.mean(deltas) + self.deviation(deltas)
        best = [
            i
            for i, delta in zip(masked, deltas, strict=True)
            if self.select == "dynamic" and delta >= outlier
        ]
        if self.select == "dynamic":
            self.run.decided(min(abs(delta - outlier) for delta in deltas))
        if len(best) < self.keep:
            scores = dict(zip(masked, deltas, strict=True))
            best = self.run.largest(scores, self.keep)
        kept = {i for i in masked if i in best or i + 1 in best}
        rightmost = max(kept)
        return kept | {i for i in masked if i < rightmost and i not in self.processed}


def plain_focus(run: Decoding, **options) -> None:
    PlainFocus(run, **options).decode()
