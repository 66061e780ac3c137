"""Passes that compute every row in every layer, and attend to what pages retain as well."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dllm_engine.model_executor.batch_tables import BatchTables, KVTables
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import LayerPass, attend_split
from dllm_engine.model_executor.step_batch import SplitRows, StepBatch, ranges
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.scheduler.page_layout import PageKind
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.step_plan import RefreshState, StepPlan

RetentionRule = Callable[[DecodingSpec, StepPlan], np.ndarray]
"""Which canvas positions an UPDATE step may retain, ascending. The first ``plan.read`` are in pages already."""


class PagedPass(LayerPass):
    """Attends to what pages retain and to the fresh rows. Uses tensors on the device only; the host reads none of
    them."""

    def __init__(self, tokens: KVTables, rows: SplitRows) -> None:
        """``tokens``: what is retained. ``rows``: those of requests that read none of it attend alone."""
        self.tokens, self.rows = tokens, rows

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend_split(layer, self.tokens, q, k, v, self.rows, attend_fresh=True)


@dataclass(frozen=True)
class UpdateGroup:
    """UPDATE requests of a batch that are alike in shape, so that one call serves them."""

    members: Sequence[int]
    """Their numbers in the batch."""
    spec: DecodingSpec
    plan: StepPlan
    """Of the first; the others' have the same lengths, window and counts."""
    rows: torch.Tensor
    """int64 ``[group, num_allowed]``: the batch rows that they may add to pages."""


class RetentionPass(PagedPass):
    """A paged pass in which UPDATE requests retain tokens.

    Requests in every refresh state share the pass: each attends to its own rows and to what its plan reads in pages,
    and in each layer UPDATE requests write what they retain behind what they read. Without more, that is all that the
    rule allows.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory, rule: RetentionRule) -> None:
        self.batch = batch
        self.pages = pages
        self.device = batch.positions.device
        read = [plan.read for plan in batch.plans]
        self.reads = any(read)
        """Whether any request attends to pages."""
        tables = BatchTables(batch, PageKind.KV).tables
        tokens = KVTables(pages, tables, on_device(read, self.device, torch.int32), max(read))
        super().__init__(tokens, batch.split_rows([not tokens_read for tokens_read in read]))

        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for i, (canvas, plan) in enumerate(zip(batch.canvases, batch.plans, strict=True)):
            if plan.state is RefreshState.UPDATE:
                alike[canvas.spec.canvas_length, plan.span, plan.window, plan.read, plan.retained].append(i)
        self.groups = [self._group(members, rule) for members in alike.values()]
        self.updating = [i for group in self.groups for i in group.members]
        """Numbers of the UPDATE requests, in the order in which their rows are retained."""
        self.retained: list[torch.Tensor] = []
        """Per layer, the batch rows that it retained."""
        if self.groups:
            plans = [batch.plans[i] for i in self.updating]
            numbers, places = ranges([plan.read for plan in plans], [plan.retained - plan.read for plan in plans])
            self.bounds = np.searchsorted(numbers, range(len(plans) + 1)).tolist()
            of_tokens = np.stack(
                (np.array(self.updating)[numbers], places // pages.page_size, places % pages.page_size)
            )
            requests, page_numbers, offsets = on_device(of_tokens, self.device).unbind()
            self.places = tables[:, requests, page_numbers].long() * pages.page_size + offsets
            """Per layer, the place in pages of each token that is retained."""
            self.heads = torch.arange(pages.num_kv_heads, device=self.device)
            self.allowed_rows = torch.cat([group.rows.flatten() for group in self.groups])

    def _group(self, members: list[int], rule: RetentionRule) -> UpdateGroup:
        spec, plan = self.batch.canvases[members[0]].spec, self.batch.plans[members[0]]
        firsts = np.array([self.batch.rows(i).start for i in members])
        rows = firsts[:, None] + rule(spec, plan)[plan.read :] - plan.span.start
        return UpdateGroup(members, spec, plan, on_device(rows, self.device))

    @property
    def repeats(self) -> bool:
        return not self.groups

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = super().attend(layer, q, k, v)
        if self.groups:
            rows = self._retained_rows(layer, q, k, v)
            self.pages.write(k[rows], v[rows], self.places[layer][:, None] * self.pages.num_kv_heads + self.heads)
            self.retained.append(rows)
        return out

    def _retained_rows(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Batch rows that a layer adds to pages: of each request of ``updating`` those of its ``plan.retained −
        plan.read`` positions, ascending. The same on every rank."""
        return self.allowed_rows

    def record(self, index: int) -> dict[str, Any]:
        if index not in self.updating:
            return {}
        at = self.updating.index(index)
        in_pages, added = range(self.batch.plans[index].read), slice(*self.bounds[at : at + 2])
        return {
            "retained_positions": [[*in_pages, *self.batch.positions[rows[added]].tolist()] for rows in self.retained]
        }


# Retention rules


def retain_beginning(spec: DecodingSpec, plan: StepPlan) -> np.ndarray:
    """The first positions, as many as the plan says: the prompt and finished blocks."""
    return np.arange(plan.retained)


def retain_outside_window(spec: DecodingSpec, plan: StepPlan) -> np.ndarray:
    """Everything outside the window, the masked suffix included."""
    return np.delete(np.arange(spec.canvas_length), slice(*plan.window))
