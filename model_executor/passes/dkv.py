"""dKV-Cache-Decode (arXiv 2505.15781): K/V of decoded tokens are kept, one step after they were decoded."""

import torch

from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.model_executor.batch_tables import TokenTables
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.passes.base import LayerPass
from dllm_engine.model_executor.step_batch import StepBatch


class OverwritePass(LayerPass):
    """K/V of every computed row replace those kept at its position, and the row attends to the whole canvas as kept."""

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        self.batch = batch
        self.tables = TokenTables(batch, pages, [plan.read for plan in batch.plans])
        sizes = [batch.num_rows(i) for i in range(len(batch.plans))]
        self.max_seqlen = max(sizes)
        # Where every canvas is computed as a whole, what the pages would give back is what was just computed.
        self.dense = all(size == c.spec.canvas_length for size, c in zip(sizes, batch.canvases, strict=True))
        self.cu_seqlens = torch.tensor(batch.cu_seqlens, dtype=torch.int32, device=batch.input_ids.device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.tables.pages.write(k, v, self.tables.row_slots(layer))
        if self.dense:
            return bidirectional_attention(q, k, v, self.batch.cu_seqlens)
        return self.tables.attend(layer, q, k, v, self.cu_seqlens, self.max_seqlen, attend_fresh=False)
