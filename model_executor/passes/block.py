"""Block diffusion (SDAR, arXiv 2510.06303): keys and values of finished blocks, kept for good."""

from typing import Any

import numpy as np
import torch

from dllm_engine.model_executor.batch_tables import BatchTables, KVTables
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.paged import PagedPass
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.scheduler.page_layout import PageKind
from dllm_engine.scheduler.step_plan import RefreshState


class BlockPass(PagedPass):
    """Rows of finished blocks go into pages, behind what a request reads there, while the next block attends to them
    among the rows. The batch says where each row's block ends."""

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        self.batch = batch
        read = [plan.read for plan in batch.plans]
        self.reads = any(read)
        tables, device = BatchTables(batch, PageKind.KV), batch.positions.device
        tokens = KVTables(pages, tables.tables, on_device(read, device, torch.int32), max(read))
        slots = None
        if not self.repeats:
            # A canvas position is a token's number in pages. What is not finished has no page yet.
            kept = batch.host_positions < np.repeat([plan.retained for plan in batch.plans], np.diff(batch.cu_seqlens))
            is_kept = on_device(kept, device, torch.bool)
            positions = batch.positions.where(is_kept, 0)
            places = tables.places(batch.request_of_row(), positions, pages.page_size).masked_fill_(~is_kept, -1)
            slots = pages.slots(places)
        super().__init__(tokens, batch.split_rows([not tokens_read for tokens_read in read]), slots)

    @property
    def repeats(self) -> bool:
        return all(plan.state is RefreshState.REUSE for plan in self.batch.plans)

    def record(self, index: int) -> dict[str, Any]:
        plan = self.batch.plans[index]
        if plan.state is RefreshState.REUSE:
            return {}
        return {"retained_positions": [[*range(plan.retained)] for _ in range(self.tokens.tables.shape[0])]}
