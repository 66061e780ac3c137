"""dKV-Cache-Decode (arXiv 2505.15781): K/V of decoded tokens are kept, one step after they were decoded."""

import torch

from dllm_engine.model_executor.batch_tables import TokenTables
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import LayerPass, attend_split
from dllm_engine.model_executor.step_batch import StepBatch


class OverwritePass(LayerPass):
    """K/V of every computed row replace those kept at its position, and the row attends to the whole canvas as kept."""

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        self.batch = batch
        self.tables = TokenTables(batch, pages, [plan.read for plan in batch.plans])
        # Of a canvas that is computed as a whole, the pages would give back what was just computed.
        self.rows = batch.split_rows([batch.num_rows(i) == c.spec.canvas_length for i, c in enumerate(batch.canvases)])

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.tables.pages.write(k, v, self.tables.row_slots(layer))
        return attend_split(layer, self.tables, q, k, v, self.rows, attend_fresh=False)
