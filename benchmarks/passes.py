"""A look inside an engine of this process: the forward passes that each dispatch ran."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from floor import PassShape
from timing import timed

from dllm_engine.evaluation.runner import runner_of, scheduler_of
from dllm_engine.scheduler.step_plan import Scope, StepPlan

if TYPE_CHECKING:
    from dllm_engine.llm import LLM


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

    @property
    def kind(self) -> str | None:
        """The kind of all its passes; None: they differ."""
        kinds = {forward.kind for forward in self.passes}
        return kinds.pop() if len(kinds) == 1 else None


def observed_step(llm: "LLM") -> Dispatch:
    """Run ``LLMEngine.step`` and record its forward passes."""
    runner, scheduler = runner_of(llm), scheduler_of(llm)
    masked = {i: state.progress.num_masked for i, state in scheduler.states.items()}
    forward = runner.denoiser.forward
    seen: list[tuple[Any, Any]] = []

    def recording(batch: Any, layer_pass: Any) -> Any:
        seen.append((batch, layer_pass))
        return forward(batch, layer_pass)

    with mock.patch.object(runner.denoiser, "forward", recording):
        outputs, seconds = timed(llm.llm_engine.step)
    return Dispatch(outputs, seconds, [_observed(batch, layer_pass, masked) for batch, layer_pass in seen])


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
