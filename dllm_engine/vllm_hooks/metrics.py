"""Metrics of a diffusion engine, beside vLLM's own on ``/metrics`` and in
``LLM.get_metrics()``.

The scheduler counts (``scheduler/engine_stats.py``). Its counts travel in a dictionary
of vLLM's ``SchedulerStats`` for key-value connectors, which diffusion engines do not
have, and are removed from it here.
"""

from dataclasses import fields
from functools import partial
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger

from dllm_engine.decisions import answering
from dllm_engine.scheduler.engine_stats import EngineStats, MetricSpec, take_stats
from dllm_engine.structured_output import automata
from dllm_engine.vllm_hooks.patch import Original, is_ours

PREFIX = {True: "vllm:diffusion_", False: "vllm:dllm_"}
"""Prefixes of names, by ``MetricSpec.of_vllm``. ``LLM.get_metrics()`` only shows
metrics that begin with ``vllm:``.
"""
OF_FRONT_END = {
    "constrained_requests": MetricSpec(
        "counter", "requests", "Requests with structured output that were admitted."
    ),
    "automaton_builds": MetricSpec(
        "counter",
        "automata",
        "Automata built for structured output, or given up at a limit.",
    ),
    "automaton_build_seconds": MetricSpec(
        "counter", "seconds", "Seconds that building these automata took."
    ),
    "decision_questions": MetricSpec(
        "counter", "questions", "Questions of decisions that were answered."
    ),
    "decision_rows": MetricSpec(
        "counter", "rows", "Rows computed to answer questions of decisions."
    ),
    "decision_prompt_tokens": MetricSpec(
        "counter", "tokens", "Prompt tokens of decisions."
    ),
    "decision_shared_tokens": MetricSpec(
        "counter",
        "tokens",
        "Prompt tokens of decisions that were read from shared pages.",
    ),
}
"""Metrics that the scheduler does not count: ``structured_output/automata.py`` counts
when requests are checked, and ``decisions/answering.py`` when questions are answered.
"""
METRICS: dict[str, MetricSpec] = {
    f.name: f.metadata["metric"] for f in fields(EngineStats)
} | OF_FRONT_END


class DiffusionStatLogger(AggregateStatLoggerBase):
    """Logger of the metrics of all engines of a front end, beside vLLM's own loggers."""

    def __init__(self, logger: Any) -> None:
        """``logger``: vLLM's logger, with the metric classes of ``prometheus_client``
        or of Ray.
        """
        self._values_per_engine: dict[int, list[Any]] = logger.per_engine_labelvalues
        self._metrics: dict[str, Any] = {}
        for name, spec in METRICS.items():
            kinds: dict[str, Any] = {
                "counter": logger._counter_cls,
                "gauge": partial(logger._gauge_cls, multiprocess_mode="mostrecent"),
                "histogram": partial(logger._histogram_cls, buckets=spec.buckets),
            }
            labels = [spec.label] if spec.label else []
            metric = self._metrics[name] = kinds[spec.kind](
                name=PREFIX[spec.of_vllm] + name,
                documentation=spec.meaning,
                labelnames=["model_name", "engine", *labels],
            )
            for engine_values in self._values_per_engine.values():
                for label_values in [[value] for value in spec.values] or [[]]:
                    # Create the series, so that it is shown from the start.
                    metric.labels(*engine_values, *label_values)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Add the counts of one message of an engine."""
        message = take_stats(scheduler_stats)
        if message is None:
            return
        amounts = message | automata.take_counts() | answering.take_counts()
        labels = self._values_per_engine[engine_idx]
        for name, spec in METRICS.items():
            metric, amount = self._metrics[name], amounts[name]
            if spec.label:
                for value, part in amount.items():
                    metric.labels(*labels, value).inc(part)
            elif spec.kind == "counter":
                metric.labels(*labels).inc(amount)
            elif spec.kind == "gauge":
                metric.labels(*labels).set(amount)
            else:
                for observation in amount:
                    metric.labels(*labels).observe(observation)

    def log_engine_initialized(self) -> None:
        """Do nothing, because vLLM's own loggers describe the engine."""


def init_with_metrics(
    init: Original, self: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Add the metrics of diffusion engines. Not by ``vllm.stat_logger_plugins``, which
    vLLM loads only in servers, and which does not tell the metric classes (of Ray or
    Prometheus)."""
    init(self, vllm_config, *args, **kwargs)
    if is_ours(vllm_config):
        (logger,) = (
            logger
            for logger in self.stat_loggers
            if isinstance(logger, PrometheusStatLogger)
        )
        # Ours comes first, because it removes our counts from the stats that the others
        # read.
        self.stat_loggers.insert(0, DiffusionStatLogger(logger))
