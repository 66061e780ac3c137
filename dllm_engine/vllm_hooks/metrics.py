"""Metrics of diffusion engines in vLLM's front ends. Engines of other models are untouched."""

from typing import Any

from dllm_engine.metrics import DiffusionMetrics
from dllm_engine.scheduler.engine_stats import take_stats
from dllm_engine.structured_output.automata import take_counts
from dllm_engine.vllm_hooks.patch import Original, is_ours


def init_with_metrics(init: Original, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Register the metrics of diffusion engines."""
    init(self, vllm_config, *args, **kwargs)
    if is_ours(vllm_config):
        self.diffusion = DiffusionMetrics(self)


def record_with_metrics(
    record: Original,
    self: Any,
    scheduler_stats: Any,
    iteration_stats: Any,
    mm_cache_stats: Any = None,
    engine_idx: int | None = None,
) -> None:
    """Record the metrics of diffusion engines."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    message = take_stats(scheduler_stats)
    record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
    if message is not None:
        counts = take_counts()
        for logger in self.stat_loggers:
            if isinstance(logger, PrometheusStatLogger):
                logger.diffusion.record(message | counts, engine_idx or 0)
