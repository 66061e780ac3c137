"""Metrics of a diffusion engine, beside vLLM's own on ``/metrics`` and in ``LLM.get_metrics()``.

The scheduler counts (``scheduler/engine_stats.py``). vLLM sends a ``SchedulerStats`` with every step from the engine's
process to a front end; it is a fixed class, and its only free dictionaries are those of key-value connectors, which
diffusion engines refuse. ``vllm_hooks`` takes ours out again before vLLM's loggers see it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dllm_engine.scheduler.messages import FAILURE_CAUSES

PREFIX = {True: "vllm:diffusion_", False: "vllm:dllm_"}
"""By ``MetricSpec.of_vllm``. vLLM shows in ``LLM.get_metrics()`` what begins with ``vllm:``."""


@dataclass(frozen=True)
class MetricSpec:
    """One metric; ``name`` is also the field of ``EngineStats`` that it shows, unless ``of_front_end``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    label: str | None = None
    """A label beside vLLM's ``model_name`` and ``engine``; the field is then a dictionary by its values."""
    values: tuple[str, ...] = ()
    """All values of ``label``, so that each is there from the start."""
    buckets: tuple[float, ...] = ()
    of_front_end: bool = False
    """Whether the front end counts it (``structured_output/requests.py``), not the scheduler."""
    of_vllm: bool = False
    """Whether vLLM's own diffusion models have it too, with this name and meaning."""

    @property
    def exposed(self) -> str:
        """The name on ``/metrics``; of a histogram, the stem of its three series."""
        return PREFIX[self.of_vllm] + self.name + ("_total" if self.kind == "counter" else "")


METRICS = (
    MetricSpec("pages_total", "gauge", "pages", "Pages of the pool that can be handed out."),
    MetricSpec("pages_reserved", "gauge", "pages", "Pages set aside for admitted requests."),
    MetricSpec("pages_allocated", "gauge", "pages", "Pages that hold retained tokens now."),
    MetricSpec("tokens_retained", "gauge", "tokens per layer", "Tokens in pages now, summed over running requests."),
    MetricSpec(
        "denoising_steps",
        "counter",
        "steps",
        "Denoising steps, each a forward pass of one request, by what it did with the request's cache.",
        label="refresh_state",
        values=("full", "update", "reuse"),
    ),
    MetricSpec(
        "num_denoising_steps",
        "counter",
        "steps",
        "Denoising steps as vLLM counts them: one more per complete block.",
        of_vllm=True,
    ),
    MetricSpec(
        "num_canvas_positions",
        "counter",
        "positions",
        "Positions of the running blocks, summed over these steps.",
        of_vllm=True,
    ),
    MetricSpec(
        "num_committed_tokens",
        "counter",
        "tokens",
        "Response tokens unmasked, beyond end tokens too.",
        of_vllm=True,
    ),
    MetricSpec("engine_steps", "counter", "batches", "Batches run: forward passes of the model."),
    MetricSpec("tokens_computed", "counter", "rows", "Rows fed to the model: tokens computed or recomputed."),
    MetricSpec(
        "eviction_candidates",
        "counter",
        "tokens per layer",
        "Tokens that UPDATE steps could have retained: the canvas, or what of it lies outside the running blocks.",
    ),
    MetricSpec("eviction_retained", "counter", "tokens per layer", "Tokens that UPDATE steps did retain."),
    MetricSpec(
        "requests_failed",
        "counter",
        "requests",
        "Requests that ended with an error, by cause.",
        label="cause",
        values=FAILURE_CAUSES,
    ),
    *(
        MetricSpec(name, "counter", unit, meaning, of_front_end=True)
        for name, unit, meaning in (
            ("constrained_requests", "requests", "Requests with structured output that were admitted."),
            ("automaton_builds", "automata", "Automata built for them, or given up at a limit."),
            ("automaton_build_seconds", "seconds", "What these took."),
            ("automaton_cache_hits", "requests", "Requests that found their automaton, or waited for the same one."),
        )
    ),
    MetricSpec(
        "request_pages_held",
        "histogram",
        "pages",
        "The most pages a request held, of each request that ended.",
        buckets=tuple(4.0**power for power in range(10)),
    ),
    MetricSpec(
        "request_tokens_per_forward",
        "histogram",
        "tokens",
        "Tokens unmasked per forward pass, of each request that ended.",
        buckets=(0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0),
    ),
)


class DiffusionMetrics:
    """The metrics of the engines behind one front end."""

    def __init__(self, classes: Mapping[str, Any], labels: list[str], values_per_engine: dict[int, list[Any]]) -> None:
        """``classes`` are ``prometheus_client``'s, or stand-ins for them (Ray has its own), by ``MetricSpec.kind``."""
        self._values_per_engine = values_per_engine
        self._metrics: dict[str, Any] = {}
        for spec in METRICS:
            of_kind: Any = {"gauge": {"multiprocess_mode": "mostrecent"}, "histogram": {"buckets": spec.buckets}}
            metric = self._metrics[spec.name] = classes[spec.kind](
                name=PREFIX[spec.of_vllm] + spec.name,
                documentation=spec.meaning,
                labelnames=[*labels, spec.label] if spec.label else labels,
                **of_kind.get(spec.kind, {}),
            )
            for of_engine in values_per_engine.values():
                for of_label in [[value] for value in spec.values] if spec.label else [[]]:
                    metric.labels(*of_engine, *of_label)  # so that it is shown from the start

    def record(self, message: dict[str, Any], engine: int) -> None:
        """Add one message of an engine."""
        labels = self._values_per_engine[engine]
        for spec in METRICS:
            metric, amount = self._metrics[spec.name], message[spec.name]
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
