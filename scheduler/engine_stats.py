"""What an engine did since it last told, and what it holds: the numbers behind the metrics."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm.v1.metrics.stats import SchedulerStats

from dllm_engine.scheduler.messages import StepReport
from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.step_plan import RefreshState, StepPlan


@dataclass
class EngineStats:
    """Counts since the last message, and gauges of this moment. Plain numbers: it crosses processes as a dictionary."""

    engine_steps: int = 0
    """Batches run; each is one forward pass for every request in it."""
    denoising_steps: dict[str, int] = field(default_factory=Counter)
    """Per refresh state, summed over requests. Each is a forward pass of a request."""
    num_denoising_steps: int = 0
    """As vLLM counts them, whose block diffusion ends each block with a pass that only commits it: one more per block
    that is complete. Ours need no such pass; ``vllm bench serve`` takes one per block off again."""
    num_canvas_positions: int = 0
    """Positions of the running blocks, summed over ``num_denoising_steps``."""
    num_committed_tokens: int = 0
    """Tokens unmasked: none is masked again."""
    tokens_computed: int = 0
    """Rows fed to the model."""
    eviction_candidates: int = 0
    """Tokens per layer that UPDATE steps could have retained."""
    eviction_retained: int = 0
    """Tokens per layer that they did retain."""
    requests_failed: dict[str, int] = field(default_factory=Counter)
    """Requests that ended with an error, by ``FailureCause``."""
    request_pages_held: list[int] = field(default_factory=list)
    """Per request that ended: the most pages it held."""
    request_tokens_per_forward: list[float] = field(default_factory=list)
    """Per request that ended."""
    pages_total: int = 0
    pages_reserved: int = 0
    pages_allocated: int = 0
    tokens_retained: int = 0
    """Tokens per layer in pages now, summed over requests."""

    def add_step(self, spec: DecodingSpec, report: StepReport) -> None:
        """Count one denoising step of one request."""
        plan = report.plan
        self.denoising_steps[plan.state.value] += 1
        steps_of_vllm = 0 if plan.prefills else 1 if report.tokens is None else 2
        self.num_denoising_steps += steps_of_vllm
        self.num_canvas_positions += steps_of_vllm * plan.window.size
        self.num_committed_tokens += report.num_unmasked
        self.tokens_computed += report.rows_computed
        if plan.state is RefreshState.UPDATE:
            self.eviction_candidates += eviction_candidates(plan, spec)
            self.eviction_retained += plan.retained

    def add_ended(self, progress: Progress) -> None:
        """Count a request that ended, however it did; one that never ran has nothing to tell."""
        if progress.num_forwards:
            self.request_pages_held.append(progress.pages_held)
            self.request_tokens_per_forward.append(progress.num_unmasked / progress.num_forwards)

    def to_message(self) -> dict[str, Any]:
        by_label = {"denoising_steps": dict(self.denoising_steps), "requests_failed": dict(self.requests_failed)}
        return asdict(self) | by_label


def eviction_candidates(plan: StepPlan, spec: DecodingSpec) -> int:
    """Tokens per layer that an UPDATE step could retain: all outside the window, or all, where the method keeps it."""
    visible = spec.visible(plan.window).size
    outside = visible - plan.window.size
    return outside if plan.retained <= outside else visible


STATS_KEY = "diffusion"


def attach_stats(scheduler_stats: SchedulerStats, stats: EngineStats) -> None:
    """Put ours into vLLM's message, whose only free dictionaries are those of key-value connectors."""
    scheduler_stats.kv_connector_stats = {STATS_KEY: stats.to_message()}


def take_stats(scheduler_stats: SchedulerStats | None) -> dict[str, Any] | None:
    """Take ours out of vLLM's message; None where there is none."""
    if scheduler_stats is None or STATS_KEY not in (scheduler_stats.kv_connector_stats or {}):
        return None
    assert scheduler_stats.kv_connector_stats is not None
    message: dict[str, Any] = scheduler_stats.kv_connector_stats[STATS_KEY]
    scheduler_stats.kv_connector_stats = None
    return message
