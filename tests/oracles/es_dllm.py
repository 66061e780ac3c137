"""ES-dLLM as slow, plain PyTorch.

Step t of the response computes the rows of the running block, and drops at the end of
some layers those that matter least; the keys and values of what is dropped stay as they
were. Rows are positions for LLaDA; for Dream the row before a position predicts it, so
a block's rows are one to the left.

Readings where the paper leaves room, besides those of docs/methods.md:

* Only rows of the running block have a confidence (the authors' code).
* In one pass of several blocks' rows scores are normalised over all rows of the pass
  that are still there.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding, gap
from tests.oracles.sparse import select

SCHEDULE = [[1.0, 0.0], [0.5, 0.125], [0.25, 0.25]]


@dataclass
class PlainESDLLM:
    """One request."""

    run: Decoding
    indicator: str = "hidden_state"
    alpha: float = 0.5
    keep_schedule: list[list[float]] | None = None
    block_refresh_interval: int = 8
    prompt_refresh_interval: int = 64
    retention_ratio: float = 1.0
    update_delay: int = 1

    def __post_init__(self) -> None:
        run, self.model = self.run, self.run.model
        run.top_p, run.top_k = 1.0, 0  # its confidence is of the plain softmax
        run.dream_sampler, run.fills_computed, run.strict = False, True, True
        num_layers = len(run.model.layers)
        schedule = [] if self.indicator == "none" else self.keep_schedule or SCHEDULE
        fractions = {int(depth * num_layers): fraction for fraction, depth in schedule}
        self.fractions = {
            layer: fraction for layer, fraction in fractions.items() if fraction < 1
        }
        self.buffer = Buffer(run)
        self.confidence = torch.zeros(run.length)
        """Of each row, when it last reached the last layer."""
        self.old: dict[int, torch.Tensor] = {}
        """By layer with a cut: what each row was like when it last was computed,
        ``[canvas, element]``.
        """
        self.retained: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        """By layer: what is left to attend to outside the block, with its keys and
        values.
        """
        run.traces["selected_positions"] = []
        if self.retention_ratio < 1:
            run.traces["retained_positions"] = []
        self.decoded_last: list[int] = []
        """Positions that the step before decoded."""
        self.shift = int(run.model.is_dream)

    def decode(self) -> None:
        for step in self.run.passes():
            first, end = self.run.window
            self.block = list(range(first - self.shift, end - self.shift))
            self.leftmost_mask = self.run.masked(first, end)[0] - self.shift
            if step == 0:
                self.retained = []
            block_due = self.is_due(self.block_refresh_interval)
            prompt_due = self.is_due(self.prompt_refresh_interval)
            due = (
                block_due
                or prompt_due
                or (step == 0 and self.run.block_add_threshold is not None)
            )
            records = self.retention_ratio < 1 and step == self.update_delay
            rows = self.rows_of_step(step, prompt_due)
            skips = bool(self.fractions) and not due and not records
            reached, logits = self.forward(rows, skips, records)
            self.run.predict(logits, rows)
            self.unmask(reached)

    def is_due(self, interval: int) -> bool:
        if self.run.block_add_threshold is None:
            return (
                self.run.window[0] - len(self.run.prompt) + self.run.step
            ) % interval == 0
        return any(number % interval == 0 for number in self.run.counts_of_last_pass)

    def rows_of_step(self, step: int, prompt_due: bool) -> list[int]:
        start = self.block[0]
        if not self.run.order or (step == 0 and self.indicator == "none"):
            return list(range(self.run.length))
        if prompt_due:
            start = 0
        elif step == 0:
            start = min(
                [start, *(position - self.shift for position in self.decoded_last)]
            )
        return list(range(start, min(self.block[-1] + 1, self.run.cut)))

    def forward(
        self, rows: list[int], skips: bool, records: bool
    ) -> tuple[list[int], torch.Tensor]:
        """The rows that reach the last layer, and the logits."""
        x = self.model.embed(self.run.canvas)[rows]
        num_rows = len(rows)
        if skips:
            self.run.traces["selected_positions"].append([])
        recorded = []
        for layer, weights in enumerate(self.model.layers):
            q, k, v = self.model.qkv(weights, x, rows)
            compared = {"query": q, "key": k, "value": v}
            if layer in self.fractions and self.indicator in compared:
                kept = self.cut(
                    layer, rows, compared[self.indicator].flatten(1), num_rows, skips
                )
                rows = [rows[i] for i in kept]
                x = x[kept]
                q = q[kept]
                k = k[kept]
                v = v[kept]
            self.buffer.k[layer, rows], self.buffer.v[layer, rows] = k, v
            keys = self.buffer.k[layer]
            values = self.buffer.v[layer]
            if records:
                outside = [
                    row for row in range(self.run.length) if row not in self.block
                ]
                retained = select(
                    self.run,
                    q,
                    keys,
                    outside,
                    int(len(outside) * self.retention_ratio),
                    3,
                )
                recorded.append((retained, keys[retained], values[retained]))
            if self.retained:
                _, old_keys, old_values = self.retained[layer]
                block = [row for row in self.block if row < self.run.cut]
                keys = torch.cat([old_keys, keys[block]])
                values = torch.cat([old_values, values[block]])
            else:
                keys = keys[: self.run.cut]
                values = values[: self.run.cut]
            x = x + self.model.attention(weights, q, keys, values)
            x = x + self.model.mlp(weights, x)
            if layer in self.fractions and self.indicator == "hidden_state":
                kept = self.cut(layer, rows, x, num_rows, skips)
                rows, x = [rows[i] for i in kept], x[kept]
        if records:
            self.retained = recorded
            self.run.traces["retained_positions"].append(
                [retained for retained, _, _ in recorded]
            )
        return rows, self.buffer.logits(x, rows)

    def cut(
        self,
        layer: int,
        rows: list[int],
        values: torch.Tensor,
        num_rows: int,
        skips: bool,
    ) -> list[int]:
        """Indices in ``rows`` of those that go on. ``num_rows``: with which the pass
        began.
        """
        old = self.old.setdefault(
            layer, torch.full((self.run.length, values.shape[1]), math.nan)
        )
        kept = list(range(len(rows)))
        if skips:
            count = max(
                int(self.fractions[layer] * num_rows),
                min(len(self.decoded_last) + 2, len(self.block)),
            )
            scores = self.importance(rows, values, old[rows])
            kept = sorted(self.run.largest(dict(enumerate(scores)), count))
            self.run.traces["selected_positions"][-1].append([rows[i] for i in kept])
        old[[rows[i] for i in kept]] = values[kept]
        return kept

    def importance(
        self, rows: list[int], values: torch.Tensor, old: torch.Tensor
    ) -> list[float]:
        size = old.square().mean(-1).sqrt() + 1e-6
        change = (values - old).abs().mean(-1) / size
        change = change / change.max().clamp(min=1)
        confidence = self.confidence[rows]
        scores = (self.alpha * confidence + (1 - self.alpha) * change).tolist()
        if self.alpha > 0:
            ordered, by_confidence = confidence.sort(descending=True, stable=True)
            if (
                len(rows) > 2
            ):  # 0 where fewer than two rows are masked: any may be the second
                self.run.decided(gap(*ordered[1:3].tolist()))
            for i in by_confidence[:2].tolist():
                scores[i] += 2
        bonus = {self.leftmost_mask: 5}
        if self.alpha < 1:
            bonus |= {position - self.shift: 3 for position in self.decoded_last}
        return [
            score + bonus.get(row, 0) for score, row in zip(scores, rows, strict=True)
        ]

    def unmask(self, rows: list[int]) -> None:
        run = self.run
        for row in set(rows) & set(self.block):
            position = row + self.shift
            p = run.logits[row].softmax(-1)
            token = run.held.get(position, int(p.argmax()))
            held = not self.shift and run.held_back(position, token)
            masked = run.canvas[position] == self.model.mask
            self.confidence[row] = float(p[token]) if masked and not held else 0.0
        run.choose()
        self.decoded_last = run.order[-1]
        self.confidence[[position - self.shift for position in self.decoded_last]] = 0.0


def plain_es_dllm(run: Decoding, **options: Any) -> None:
    PlainESDLLM(run, **options).decode()
