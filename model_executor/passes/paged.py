"""Passes that compute every row in every layer, and attend to what pages retain as
well.
"""

from collections import defaultdict
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from dllm_engine.decoding.step_plan import RefreshState, StepPlan
from dllm_engine.model_executor.batch_tables import ALL_LAYERS, KVTables, TokenTables
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import LayerPass, attend_split
from dllm_engine.model_executor.step_batch import SplitRows, StepBatch, ranges
from dllm_engine.model_executor.transfer import on_device


class PagedPass(LayerPass):
    """Attends to retained tokens in pages and to the fresh rows. All tensors stay on
    the device; the host reads none of them."""

    def __init__(
        self,
        tokens: KVTables,
        rows: SplitRows,
        slots: torch.Tensor | None = None,
        *,
        attend_fresh: bool = True,
    ) -> None:
        """``rows``: those of requests that read no ``tokens`` attend alone. ``slots``:
        where the rows' keys and values are written before any row attends, int64
        ``[num_layers, num_rows, num_kv_heads]``; None: nowhere. With ``attend_fresh`` a
        row attends to its request's own rows as well."""
        self.tokens, self.rows, self.row_slots, self.attend_fresh = (
            tokens,
            rows,
            slots,
            attend_fresh,
        )
        self.writes = slots is not None

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if self.row_slots is not None:
            self.tokens.pages.write(k, v, self.row_slots[layer])
        out = attend_split(
            layer, self.tokens, q, k, v, self.rows, attend_fresh=self.attend_fresh
        )
        if self.chooses:
            self.retain(layer, q, k, v)
        return out

    def retain(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write what a layer chooses to pages. Arguments as of ``attend``."""
        raise NotImplementedError


class OverwritePass(PagedPass):
    """K/V of every computed row replace those kept at its position, and the row attends
    to the canvas as kept, as far as its plan reads."""

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        self.batch, tokens = batch, TokenTables(batch, pages)
        # Where all that is read is computed, the pages would give back what was just
        # computed.
        rows = batch.split_rows(
            [
                plan.read == size
                for plan, size in zip(batch.plans, batch.sizes, strict=True)
            ]
        )
        super().__init__(tokens, rows, tokens.row_slots(), attend_fresh=False)
        self.repeats = all(plan.state is RefreshState.REUSE for plan in batch.plans)


class RetentionPass(PagedPass):
    """A paged pass in which UPDATE requests retain tokens.

    Requests in every refresh state share the pass: each attends to its own rows and to
    what its plan reads in pages, and in each layer UPDATE requests write what they
    retain behind what they read. This class retains every position that a plan names; a
    subclass may choose.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        self.batch, tokens = batch, TokenTables(batch, pages)
        super().__init__(
            tokens, batch.split_rows([not plan.read for plan in batch.plans])
        )
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for i, plan in enumerate(batch.plans):
            if plan.state is RefreshState.UPDATE:
                alike[plan.span, plan.window, plan.read, plan.adds].append(i)
        self.groups = list(alike.values())
        """Numbers of the UPDATE requests, those together that compute and
        add the same.
        """
        self.named = [_named_rows(batch.plans[members[0]]) for members in self.groups]
        """Per group, the rows of the positions that ``plan.adds`` names, among a
        request's own; on the host.
        """
        self.writes, self.repeats = bool(self.groups), not self.groups
        self.updating = [i for members in self.groups for i in members]
        """Numbers of the UPDATE requests, in the order in which their rows are
        retained.
        """
        if self.groups:
            plans = [batch.plans[i] for i in self.updating]
            counts = [plan.retained - plan.read for plan in plans]
            self.bounds = [0, *accumulate(counts)]
            """Bounds of the tokens that each of ``updating`` adds to pages."""
            places = (
                np.repeat(self.updating, counts),
                ranges([plan.read for plan in plans], counts)[1],
            )
            slots = tokens.token_slots(
                ALL_LAYERS, *on_device(np.stack(places), batch.device).unbind()
            )
            named = zip(self.groups, self.named, strict=True)
            rows = np.concatenate(
                [batch.bounds[i] + own for members, own in named for i in members]
            )
            self.named_rows = on_device(rows, batch.device)
            """``named`` among the rows of the batch, in the order of ``updating``."""
            if self.chooses:
                self.slots = slots
                """Per layer, the slots of each token that is retained."""
                self.results = [self.named_rows.new_empty(slots.shape[:2])]
            else:
                shape = slots.shape[0], batch.bounds[-1], slots.shape[2]
                self.row_slots = slots.new_full(shape, -1).index_copy_(
                    1, self.named_rows, slots
                )
                self.results = [self.named_rows.expand(slots.shape[0], -1)]

    def record(self, index: int) -> dict[str, Any]:
        if index not in self.updating:
            return {}
        at = self.updating.index(index)
        added, read = slice(*self.bounds[at : at + 2]), self.batch.plans[index].read
        canvas = self.batch.canvases[index]
        # Of each layer, what pages held before comes first. What other requests wrote
        # is a beginning of the canvas.
        (retained,) = self.results
        before = canvas.cache_state or [[] for _ in retained]
        canvas.cache_state = [
            [
                *(held if len(held) >= read else range(read))[:read],
                *self.batch.positions[rows[added]].tolist(),
            ]
            for held, rows in zip(before, retained, strict=True)
        ]
        return {"retained_positions": [sorted(held) for held in canvas.cache_state]}


def _named_rows(plan: StepPlan) -> np.ndarray:
    spans = [span for retention in plan.adds for span in retention.spans]
    return ranges(
        [span.start - plan.span.start for span in spans], [span.size for span in spans]
    )[1]
