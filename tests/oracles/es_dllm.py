"""ES-dLLM as slow, plain PyTorch.

Step t of the response computes the rows of the running block, and drops at the end of some layers those that matter
least; the keys and values of what is dropped stay as they were. Rows are positions for LLaDA; for Dream the row before
a position predicts it, so a block's rows are one to the left.

Readings where the paper leaves room:

* Time t counts tokens where it crosses blocks: block b begins at the time b times the block length, however many steps
  the blocks before it took (the authors' code).
* Only rows of the running block have a confidence; those of later blocks have none yet (the authors' code).
* A block begins with the rows from the leftmost one decoded in the step before, which belongs to the block before.
* In one pass of several blocks' rows (a refresh of the prompt, a block's beginning) scores are normalised over all rows
  of the pass that are still there.
* A step that unmasks a fixed count unmasks fewer where fewer masked rows reached the last layer; a block goes on until
  it holds no mask.
* Several blocks at once are one window. It has no such time: intervals count the tokens unmasked. A pass in which a
  block joined drops no row.
* Queries and keys are compared after RoPE.
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
        self.fractions = {int(depth * num_layers): fraction for fraction, depth in schedule}
        self.fractions = {number: fraction for number, fraction in self.fractions.items() if fraction < 1}
        self.buffer = Buffer(run)
        self.confidence = torch.zeros(run.length)
        """Of each row, when it last reached the last layer."""
        self.old = {number: [math.nan] * run.length for number in self.fractions}
        """By layer with a cut and row: what the row was like when it last was computed."""
        self.retained: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        """By layer: what is left to attend to outside the block, with its keys and values."""
        self.retained_by_block: list[list[list[int]]] = []
        self.selected: list[list[list[int]]] = []
        """By pass that skips: the rows that each cut kept."""
        run.traces["selected_positions"] = self.selected
        if self.retention_ratio < 1:
            run.traces["retained_positions"] = self.retained_by_block
        self.decoded_last: list[int] = []
        """Positions that the step before decoded."""
        self.shift = 1 if run.model.is_dream else 0

    def decode(self) -> None:
        for step in self.run.passes():
            first, end = self.run.window
            self.block = list(range(first - self.shift, end - self.shift))
            self.leftmost_mask = self.run.masked(first, end)[0] - self.shift
            if step == 0:
                self.retained = []
            block_due, prompt_due = (
                self.is_due(interval, first, step)
                for interval in (self.block_refresh_interval, self.prompt_refresh_interval)
            )
            due = block_due or prompt_due or (step == 0 and self.run.block_add_threshold is not None)
            records = self.retention_ratio < 1 and step == self.update_delay
            rows = self.rows_of_step(step, prompt_due)
            reached, logits = self.forward(rows, bool(self.fractions) and not due and not records, records)
            self.run.predict(logits, rows)
            self.unmask(reached, logits)

    def is_due(self, interval: int, first: int, step: int) -> bool:
        if self.run.block_add_threshold is None:
            return (first - len(self.run.prompt) + step) % interval == 0
        known = sum(map(len, self.run.order))
        return any(number % interval == 0 for number in range(known - len(self.decoded_last) + 1, known + 1))

    def rows_of_step(self, step: int, prompt_due: bool) -> list[int]:
        start = self.block[0]
        if not self.run.order or (step == 0 and self.indicator == "none"):
            return list(range(self.run.length))
        if prompt_due:
            start = 0
        elif step == 0:
            start = min([start, *(position - self.shift for position in self.decoded_last)])
        return list(range(start, min(self.block[-1] + 1, self.run.cut)))

    def forward(self, rows: list[int], skips: bool, records: bool) -> tuple[list[int], torch.Tensor]:
        """The rows that reach the last layer, and the logits."""
        x, range_length = self.model.embed(self.run.canvas)[rows], len(rows)
        cuts: list[list[int]] = []
        recorded = []

        def cut(layer: int, values: torch.Tensor) -> list[int]:
            """Indices of the rows that go on."""
            kept = list(range(len(rows)))
            if skips:
                kept = self.cut(layer, rows, values, range_length)
                cuts.append([rows[i] for i in kept])
            for i in kept:
                self.old[layer][rows[i]] = values[i].clone()
            return kept

        for layer, weights in enumerate(self.model.layers):
            q, k, v = self.model.qkv(weights, x, rows)
            tensors = {"query": q.flatten(1), "key": k.flatten(1), "value": v.flatten(1)}
            if layer in self.fractions and self.indicator in tensors:
                kept = cut(layer, tensors[self.indicator])
                rows, x, q, k, v = [rows[i] for i in kept], x[kept], q[kept], k[kept], v[kept]
            self.buffer.k[layer, rows], self.buffer.v[layer, rows] = k, v
            keys, values = self.buffer.k[layer], self.buffer.v[layer]
            block = [row for row in self.block if row < self.run.cut]
            if records:
                outside = [row for row in range(self.run.length) if row not in self.block]
                retained = select(self.run, q, keys, outside, int(len(outside) * self.retention_ratio), 3)
                recorded.append((retained, keys[retained].clone(), values[retained].clone()))
            if self.retained:
                _, old_keys, old_values = self.retained[layer]
                keys, values = torch.cat([old_keys, keys[block]]), torch.cat([old_values, values[block]])
            else:
                keys, values = keys[: self.run.cut], values[: self.run.cut]
            x = x + self.model.attention(weights, q, keys, values)
            x = x + self.model.mlp(weights, x)
            if layer in self.fractions and self.indicator == "hidden_state":
                kept = cut(layer, x)
                rows, x = [rows[i] for i in kept], x[kept]
        if skips:
            self.selected.append(cuts)
        if records:
            self.retained = recorded
            self.retained_by_block.append([retained for retained, _, _ in recorded])
        return rows, self.buffer.logits(x, rows)

    def cut(self, layer: int, rows: list[int], values: torch.Tensor, range_length: int) -> list[int]:
        """Indices in ``rows`` of those that go on, ascending."""
        run = self.run
        count = max(int(self.fractions[layer] * range_length), min(len(self.decoded_last) + 2, len(self.block)))
        change = []
        for row, value in zip(rows, values, strict=True):
            old = self.old[layer][row]
            size = float(old.norm()) / math.sqrt(len(old)) + 1e-6
            change.append(float((value - old).abs().mean()) / size)
        largest = max([1.0, *change])
        confidence = self.confidence[rows].tolist()
        scores = [self.alpha * c + (1 - self.alpha) * d / largest for c, d in zip(confidence, change, strict=True)]
        if self.alpha > 0:
            by_confidence = sorted(range(len(rows)), key=lambda i: -confidence[i])
            if len(rows) > 2:
                second, third = (confidence[i] for i in by_confidence[1:3])
                run.decided(gap(second, third))  # 0 where fewer than two rows are masked: any may be the second
            for i in by_confidence[:2]:
                scores[i] += 2
        bonus = [0.0] * len(rows)
        for i, row in enumerate(rows):
            if row == self.leftmost_mask:
                bonus[i] = 5
            if self.alpha < 1 and row + self.shift in self.decoded_last:
                bonus[i] = 3
        scores = [score + extra for score, extra in zip(scores, bonus, strict=True)]
        by_score = sorted(range(len(rows)), key=lambda i: -scores[i])
        if count < len(rows):
            run.decided(gap(scores[by_score[count - 1]], scores[by_score[count]]))
        return sorted(by_score[:count])

    def unmask(self, rows: list[int], logits: torch.Tensor) -> None:
        run = self.run
        for row in set(rows) & set(self.block):
            position = row + self.shift
            p = logits[row].softmax(-1)
            token = run.held.get(position, int(p.argmax()))
            held = not self.shift and run.held_back(position, token)
            masked = run.canvas[position] == self.model.mask
            self.confidence[row] = float(p[token]) if masked and not held else 0.0
        run.choose()
        self.decoded_last = run.order[-1]
        self.confidence[[position - self.shift for position in self.decoded_last]] = 0.0


def plain_es_dllm(run: Decoding, **options: Any) -> None:
    PlainESDLLM(run, **options).decode()
