"""Block diffusion (SDAR, arXiv 2510.06303): keys and values of finished blocks, kept for good."""

from typing import Any

from dllm_engine.model_executor.passes.paged import RetentionPass
from dllm_engine.scheduler.step_plan import RefreshState


class BlockPass(RetentionPass):
    """Rows of finished blocks go into pages, behind what a request reads there, while the next block attends to them
    among the rows. The batch says where each row's block ends."""

    def record(self, index: int) -> dict[str, Any]:
        plan = self.batch.plans[index]
        if plan.state is RefreshState.REUSE:
            return {}
        return {"retained_positions": [[*range(plan.retained)] for _ in range(self.tokens.tables.shape[0])]}
