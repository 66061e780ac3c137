"""Layer pass of Sparse-dLLM (arXiv 2508.02558): it retains the tokens outside the
window that are important to the window's queries.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce

from dllm_engine.cache_methods.scorers import SCORERS, ScoredLayer
from dllm_engine.cache_methods.sparse.method import RETAINED_PAGES, SparseOptions
from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.page_layout import PageKind
from dllm_engine.decoding.step_plan import RefreshState
from dllm_engine.kernels.attention_scores import mean_query_scores, select_retained
from dllm_engine.kernels.paged_attention import attention_with_lse
from dllm_engine.kernels.pages import page_places
from dllm_engine.model_executor.batch_tables import ALL_LAYERS, TokenTables
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import (
    GraphParts,
    LayerPass,
    Results,
)
from dllm_engine.model_executor.passes.paged import AddingPass, RetentionPass
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.transfer import on_device


@dataclass(frozen=True)
class RetainedPositions:
    """State of a request that is refreshed in parts."""

    positions: Tensor
    """Canvas positions of the tokens in pages, in order, ``[num_layers,
    num_retained]``.
    """


class SparsePass(AddingPass):
    """Pass for bidirectional sparse caching. Each layer retains a different set of
    tokens, which its heads share.

    Algorithm 4, lines 8 to 15 (Algorithm 5 for ``scope="prefix"``): mean query of the
    window against each candidate's key, mean over heads, max-pooling over the
    candidates laid end to end, top-k.
    """

    @classmethod
    def of(cls, batch: StepBatch, pages: PageMemory) -> LayerPass:
        """This pass if a request has to choose tokens, else a ``RetentionPass``."""
        if any(plan.state is RefreshState.UPDATE for plan in batch.plans):
            return cls(batch, pages)
        return RetentionPass(batch, pages, _reading(batch))

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        self.options = SparseOptions.of(batch.canvases[0].spec)
        self.pages = pages
        self.first_shared: dict[int, int] = {}
        """Index of the first shared candidate of each request. Candidates in shared
        pages are numbered after the rows of the batch.
        """
        requests: list[int] = []
        positions: list[int] = []
        for i, plan in enumerate(batch.plans):
            if plan.own is not None and plan.own.reads == PageKind.KV and plan.adds:
                self.first_shared[i] = batch.bounds[-1] + len(positions)
                positions += range(plan.num_anchored, plan.read)
                requests += [i] * (plan.read - plan.num_anchored)
        shared_requests, self.shared_positions = on_device(
            np.array([requests, positions], dtype=np.int64), batch.device
        ).unbind()
        reading = _reading(batch)
        adding = [
            PageKind.KV if plan.own is None else RETAINED_PAGES for plan in batch.plans
        ]
        super().__init__(batch, pages, reading, adding)
        self.goes_on = [a == b for a, b in zip(reading, adding, strict=True)]
        """True for a request that adds tokens behind those that it reads."""
        if positions:
            self.shared_slots = self.reading.token_slots(
                ALL_LAYERS, shared_requests, self.shared_positions
            )
        if any(plan.own is not None for plan in batch.plans):
            self.row_slots = self._slots_in_order()
        self.added_parts = [
            retention for i in self.updating for retention in batch.plans[i].adds
        ]
        """All ``adds`` of the plans of ``updating``, in order."""
        self.chosen_alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        """Indices of the parts whose tokens have to be chosen, grouped by sizes, so
        that a layer chooses for a group at once.
        """
        for number, part in enumerate(self.added_parts):
            if part.count < part.num_positions:
                sizes = part.num_positions, part.count
                self.chosen_alike[sizes].append(number)
        self.retained_rows = self.named_rows.new_empty(self.slots.shape[:2])
        """Rows that each layer retains, ``[num_layers, n]``, in the order of
        ``updating``.
        """
        self.windows: list[Tensor] = []
        """Window rows of each request of ``updating``."""
        for i in self.updating:
            plan = batch.plans[i]
            window_rows = np.arange(*plan.window) - plan.span.start + plan.num_anchored
            self.windows.append(on_device(batch.bounds[i] + window_rows, batch.device))

    def graph_parts(self) -> GraphParts | None:
        batch = self.batch
        if batch.limits is not None or self.options.scorer != "mean_query":
            return None
        if any(plan.own is not None for plan in batch.plans):
            return None
        layout = (
            tuple(batch.sizes),
            self.rows.num_paged_rows,
            tuple(self.updating),
            tuple((part.num_positions, part.count) for part in self.added_parts),
        )
        inputs = [
            self.tokens.tables,
            self.tokens.head_len,
            self.tokens.token_lens,
            *self.rows.graph_inputs(),
            self.named_rows,
            self.slots,
            *self.windows,
        ]
        return GraphParts(layout, inputs)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(layer, q, k, v)
        if len(self.shared_positions):
            k, v = self._with_shared(layer, k, v)
        rows = self._retained_rows(layer, q, k, v)
        self.tokens.pages.write(k[rows], v[rows], self.slots[layer])
        self.retained_rows[layer] = rows
        return out

    def results(self) -> Results:
        return [self.retained_rows]

    def take_read_tensors(
        self, index: int, results: Results, arrays: Sequence[np.ndarray]
    ) -> int | None:
        """Remember the retained positions if a later refresh renews only a part of
        them.
        """
        added = self.added(index)
        if added is not None and self.options.refresh != "all":
            positions = self.positions_of(results[0][:, added])
            canvas = self.batch.canvases[index]
            read = self.batch.plans[index].read
            if read and self.goes_on[index]:
                positions = torch.cat((canvas.own.positions[:, :read], positions), 1)
            canvas.own = RetainedPositions(positions)
        return None

    def record(self, index: int, results: Results) -> dict[str, Any]:
        added = self.added(index)
        if added is None:
            return {}
        retained = self.batch.canvases[index].own
        positions = (
            self.positions_of(results[0][:, added])
            if retained is None
            else retained.positions
        )
        return {"retained_positions": [sorted(layer) for layer in positions.tolist()]}

    def batch_rows(self, index: int, request_rows: np.ndarray) -> np.ndarray:
        """Indices in the batch of rows of a request. Negative ``request_rows`` are
        shared candidates.
        """
        rows = super().batch_rows(index, request_rows)
        if index in self.first_shared:
            plan = self.batch.plans[index]
            number = request_rows + plan.span.start - plan.num_anchored
            rows = np.where(request_rows < 0, self.first_shared[index] + number, rows)
        return rows

    def positions_of(self, rows: Tensor) -> Tensor:
        """Canvas positions of rows of the batch and of shared candidates."""
        return torch.cat((self.batch.positions, self.shared_positions))[rows]

    def _slots_in_order(self) -> Tensor:
        """Slots of the rows that requests keep in order; −1 for other rows."""
        batch = self.batch
        spans = [
            Span(0, 0) if plan.own is None else plan.own.keeps for plan in batch.plans
        ]
        is_kept = batch.places_in(spans) >= 0
        kept = on_device(np.where(is_kept, batch.host_positions, -1), batch.device)
        in_order = TokenTables(batch, self.pages)
        slots = in_order.token_slots(ALL_LAYERS, batch.requests, kept)
        self._keep_anchors(slots)
        return slots

    def _with_shared(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the batch, followed by those of shared candidates."""
        places = page_places(self.shared_slots[layer], self.pages.keys)
        return (
            torch.cat((k, self.pages.keys[places])),
            torch.cat((v, self.pages.values[places])),
        )

    def _retained_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Batch rows that a layer adds to pages: as many as ``plan.adds`` asks for, for
        each request of ``updating``, in order. The same on every rank."""
        scores = self._scores(layer, q, k, v)
        if scores.numel():
            # Ranks score with different heads, but must retain the same tokens. Only
            # the order counts, not the scale.
            scores = tensor_model_parallel_all_reduce(scores)
        sizes = [part.num_positions for part in self.added_parts]
        rows = [*self.named_rows.split(sizes)]
        scored = scores.split(sizes)
        for (_, count), numbers in self.chosen_alike.items():
            chosen = select_retained(
                torch.stack([scored[i] for i in numbers]),
                count,
                self.options.pool_kernel_size,
            )
            candidates = torch.stack([rows[i] for i in numbers])
            for i, part_rows in zip(numbers, candidates.gather(1, chosen), strict=True):
                rows[i] = part_rows
        return torch.cat([self.named_rows[:0], *rows])  # a plan may add nothing

    def _scores(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Score of each of ``named_rows``, summed over this rank's heads; float32."""
        options = self.options
        batch = self.batch
        sizes = [
            sum(part.num_positions for part in batch.plans[i].adds)
            for i in self.updating
        ]
        scores = [q.new_zeros(0, dtype=torch.float32)]
        for i, window, candidates in zip(
            self.updating, self.windows, self.named_rows.split(sizes), strict=True
        ):
            if options.scorer == "mean_query":
                # The paper's score: raw products, so that heads with large queries and
                # keys count more.
                scores.append(mean_query_scores(q[window], k[candidates]))
                continue
            rows = batch.rows(i)
            plan = batch.plans[i]
            qkv = q[rows], k[rows], v[rows]
            _, lse = attention_with_lse(*qkv, [0, plan.span.size])
            numbers = layer, self.pages.first_kv_head, options.observation_window
            scored = ScoredLayer(
                *qkv[:2], lse, batch.canvases[i], plan.window, *numbers
            )
            scorer = SCORERS[options.scorer]
            scores.append(scorer.score(scored, candidates - rows.start).sum(dim=0))
        return torch.cat(scores)


def _reading(batch: StepBatch) -> list[str]:
    """Kind of the tables that each request reads."""
    return [PageKind.KV if plan.own is None else plan.own.reads for plan in batch.plans]
