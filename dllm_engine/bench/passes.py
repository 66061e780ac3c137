"""A look inside an engine of this process: which forward passes each dispatch ran."""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from dllm_engine.bench.floor import PassShape
from dllm_engine.bench.machine import now, timed
from dllm_engine.scheduler.step_plan import Scope, StepPlan

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.model_executor.model_runner import DiffusionModelRunner
    from dllm_engine.scheduler.diffusion_scheduler import DiffusionScheduler


def is_in_process(llm: "LLM") -> bool:
    """Whether an engine and its only worker run in this process, and so can be looked into."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    return core is not None and hasattr(core.model_executor, "driver_worker")


def runner_of(llm: "LLM") -> "DiffusionModelRunner":
    """The model runner of an engine in this process, on a single device."""
    runner: DiffusionModelRunner = (
        llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    )
    return runner


def scheduler_of(llm: "LLM") -> "DiffusionScheduler":
    """The scheduler of an engine in this process."""
    scheduler: DiffusionScheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return scheduler


@dataclass(frozen=True)
class ObservedPass:
    """One forward pass of a batch."""

    plans: list[StepPlan]
    shape: PassShape

    @property
    def kind(self) -> str | None:
        """``whole`` where every request computes its whole canvas, ``update`` where every one keeps less, ``reuse``
        where every one reuses; None: mixed."""
        kinds = {"whole" if plan.scope is Scope.ALL else plan.state.value for plan in self.plans}
        return kinds.pop() if len(kinds) == 1 else None


@dataclass(frozen=True)
class Dispatch:
    """One call of ``LLMEngine.step``."""

    outputs: list[Any]
    seconds: float
    passes: list[ObservedPass]
    starts: list[float]
    """When each pass was begun, in seconds since the call."""

    @property
    def kind(self) -> str | None:
        """That of all its passes, where they are of one kind."""
        kinds = {forward.kind for forward in self.passes}
        return kinds.pop() if len(kinds) == 1 else None

    @property
    def timed_passes(self) -> list[tuple[ObservedPass, float]]:
        """The passes with their seconds, to the beginning of the next one. A GPU has them all at once: there they share
        the dispatch's, and none is timed where they are of several kinds."""
        if torch.cuda.is_available():
            return [(forward, self.seconds / len(self.passes)) for forward in self.passes if self.kind is not None]
        # Each begins where the one before ended; what precedes the first belongs to it.
        bounds = itertools.pairwise([0.0, *self.starts[1:], self.seconds])
        return [(forward, stop - start) for forward, (start, stop) in zip(self.passes, bounds, strict=False)]


def observed_step(llm: "LLM") -> Dispatch:
    """Run ``LLMEngine.step`` and record its forward passes."""
    runner, scheduler = runner_of(llm), scheduler_of(llm)
    masked = {i: state.progress.num_masked for i, state in scheduler.states.items()}
    forward = runner.denoiser.forward
    seen: list[tuple[Any, Any]] = []
    starts: list[float] = []

    def recording(batch: Any, layer_pass: Any) -> Any:
        seen.append((batch, layer_pass))
        starts.append(now() - begin)
        return forward(batch, layer_pass)

    begin = now()
    with mock.patch.object(runner.denoiser, "forward", recording):
        outputs, seconds = timed(llm.llm_engine.step)
    return Dispatch(outputs, seconds, [_observed(batch, layer_pass, masked) for batch, layer_pass in seen], starts)


def _observed(batch: Any, layer_pass: Any, masked: dict[str, int]) -> ObservedPass:
    """A pass, given how many tokens the window of each request had masked; lowers these by what the plans unmask."""
    head_rows = 0
    for request_id, plan in zip(batch.request_ids, batch.plans, strict=True):
        left = masked.get(request_id, plan.window.size)
        head_rows += min(left, plan.quota.candidates.size)
        masked[request_id] = left - min(left, plan.quota.count)
    rows = [layer_pass.rows_computed(i, batch.num_rows(i)) for i in range(len(batch.plans))]
    specs = [canvas.spec for canvas in batch.canvases]
    canvases = [spec.visible(plan.window).size for spec, plan in zip(specs, batch.plans, strict=True)]
    blocks = [spec.block_length if spec.is_block_causal else None for spec in specs]
    return ObservedPass(list(batch.plans), PassShape.of_plans(batch.plans, rows, canvases, head_rows, blocks))
