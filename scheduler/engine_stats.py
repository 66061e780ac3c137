"""Engine counters since the last report, and gauges: the numbers behind the metrics."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm.v1.metrics.stats import SchedulerStats

from dllm_engine.decoding.messages import FAILURE_CAUSES, StepReport
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.decoding.step_plan import RefreshState
from dllm_engine.scheduler.page_pool import PagePool

STATS_KEY = "diffusion"
"""Key of ``SchedulerStats.kv_connector_stats``."""


@dataclass(frozen=True)
class MetricSpec:
    """Declaration of a number on ``/metrics``."""

    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    label: str | None = None
    """A label beside vLLM's ``model_name`` and ``engine``; the number is then a
    dictionary by its values.
    """
    values: tuple[str, ...] = ()
    """All values of ``label``, so that each series exists from the start."""
    buckets: tuple[float, ...] = ()
    of_vllm: bool = False
    """True if vLLM's own diffusion models report a metric of this name and meaning."""


def metric(
    kind: Literal["counter", "gauge", "histogram"], unit: str, meaning: str, **more: Any
) -> Any:
    """Declare a field of ``EngineStats``: a number, a dictionary of numbers by label,
    or for a histogram a list of numbers.
    """
    spec = MetricSpec(kind, unit, meaning, **more)
    blank: Callable[[], Any] = (
        Counter if spec.label else list if kind == "histogram" else int
    )
    return field(default_factory=blank, metadata={"metric": spec})


@dataclass
class EngineStats:
    """Counts since the last message, and current gauges. All are plain numbers, because
    the object crosses processes as a dictionary.
    """

    pages_total: int = metric(
        "gauge", "pages", "Pages of the pool that can be handed out."
    )
    pages_reserved: int = metric(
        "gauge", "pages", "Pages set aside for admitted requests."
    )
    pages_allocated: int = metric(
        "gauge", "pages", "Pages that hold retained tokens now."
    )
    tokens_retained: int = metric(
        "gauge",
        "tokens per layer",
        "Tokens in pages now, summed over running requests.",
    )
    denoising_steps: dict[str, int] = metric(  # noqa: RUF009 - makes a dataclass field
        "counter",
        "steps",
        "Denoising steps, each a forward pass of one request, by what it did with the "
        "request's cache.",
        label="refresh_state",
        values=tuple(state.value for state in RefreshState),
    )
    num_denoising_steps: int = metric(
        "counter",
        "steps",
        "Denoising steps as vLLM counts them: one more per complete block.",
        of_vllm=True,
    )
    """vLLM's block diffusion ends each block with a pass that only commits it, and
    ``vllm bench serve`` subtracts one pass per block. Our models need no such pass."""
    num_canvas_positions: int = metric(
        "counter",
        "positions",
        "Positions of the running blocks, summed over these steps.",
        of_vllm=True,
    )
    num_committed_tokens: int = metric(
        "counter",
        "tokens",
        "Response tokens unmasked, including those after an end token.",
        of_vllm=True,
    )
    engine_steps: int = metric(
        "counter", "batches", "Batches run: forward passes of the model."
    )
    tokens_computed: int = metric(
        "counter", "rows", "Rows fed to the model: tokens computed or recomputed."
    )
    eviction_candidates: int = metric(
        "counter",
        "tokens per layer",
        "Tokens that UPDATE steps could have retained: the canvas, or its positions "
        "outside the running blocks.",
    )
    eviction_retained: int = metric(
        "counter", "tokens per layer", "Tokens that UPDATE steps did retain."
    )
    requests_failed: dict[str, int] = metric(  # noqa: RUF009 - makes a dataclass field
        "counter",
        "requests",
        "Requests that ended with an error, by cause.",
        label="cause",
        values=FAILURE_CAUSES,
    )
    request_pages_held: list[int] = metric(  # noqa: RUF009 - makes a dataclass field
        "histogram",
        "pages",
        "The most pages a request held, of each request that ended.",
        buckets=tuple(4.0**power for power in range(10)),
    )
    request_tokens_per_forward: list[float] = metric(  # noqa: RUF009 - makes a dataclass field
        "histogram",
        "tokens",
        "Tokens unmasked per forward pass, of each request that ended.",
        buckets=(0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0),
    )

    def add_step(self, spec: DecodingSpec, report: StepReport) -> None:
        plan = report.plan
        self.denoising_steps[plan.state.value] += 1
        steps_of_vllm = 0 if plan.quota.is_empty else 1 if report.tokens is None else 2
        self.num_denoising_steps += steps_of_vllm
        self.num_canvas_positions += steps_of_vllm * plan.window.size
        self.num_committed_tokens += report.num_unmasked
        self.tokens_computed += report.rows_computed
        if plan.state is RefreshState.UPDATE:
            visible = spec.layout.visible(plan.window).size
            outside = visible - plan.window.size
            self.eviction_candidates += outside if plan.retained <= outside else visible
            self.eviction_retained += plan.retained

    def set_gauges(self, pages: PagePool, tokens_retained: int) -> None:
        self.pages_total = pages.num_pages
        self.pages_reserved = pages.num_reserved
        self.pages_allocated = pages.num_allocated
        self.tokens_retained = tokens_retained

    def add_ended(self, progress: Progress) -> None:
        """Count a request that has ended, for whatever reason. A request that never ran
        is not counted.
        """
        if progress.num_forwards:
            self.request_pages_held.append(progress.pages_held)
            self.request_tokens_per_forward.append(
                progress.num_unmasked / progress.num_forwards
            )

    def message(self) -> dict[str, Any]:
        """The counts for ``SchedulerStats.kv_connector_stats``. vLLM's message has no
        other dictionary that is free.
        """
        return {STATS_KEY: vars(self)}


def take_stats(scheduler_stats: SchedulerStats | None) -> dict[str, Any] | None:
    """Remove our counts from vLLM's message and return them; None if there are none."""
    if scheduler_stats is None:
        return None
    message = (scheduler_stats.kv_connector_stats or {}).get(STATS_KEY)
    if message is not None:
        scheduler_stats.kv_connector_stats = None
    return message
