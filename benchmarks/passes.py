"""A look inside an engine of this process: the forward passes that each dispatch ran,
and the time in the model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

from floor import PassShape, attended_keys
from timing import timed, watched

from dllm_engine import LLM
from dllm_engine.decoding.step_plan import Scope, StepPlan
from dllm_engine.evaluation.runner import runner_of, scheduler_of


@dataclass(frozen=True)
class ObservedPass:
    """One forward pass of a batch."""

    plans: list[StepPlan]
    shape: PassShape

    @property
    def kind(self) -> str | None:
        """``whole`` where every request computes its whole canvas, ``update`` where
        every one keeps less, ``reuse`` where every one reuses; None: mixed."""
        kinds = {
            "whole" if plan.scope is Scope.ALL else plan.state.value
            for plan in self.plans
        }
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


def observed_step(llm: LLM) -> Dispatch:
    """Run ``LLMEngine.step`` and record its forward passes."""
    runner, scheduler = runner_of(llm), scheduler_of(llm)
    masked = {i: state.progress.num_masked for i, state in scheduler.states.items()}
    forward = runner.denoiser.forward
    seen: list[tuple[Any, Any, Any]] = []

    def recording(batch: Any, layer_pass: Any) -> Any:
        hidden, results = forward(batch, layer_pass)
        seen.append((batch, layer_pass, results))
        return hidden, results

    with mock.patch.object(runner.denoiser, "forward", recording):
        outputs, seconds = timed(llm.llm_engine.step)
    return Dispatch(
        outputs,
        seconds,
        [_observed(*forward_pass, masked) for forward_pass in seen],
    )


def _observed(
    batch: Any, layer_pass: Any, results: Any, masked: dict[str, int]
) -> ObservedPass:
    """A pass, given how many tokens the window of each request had masked; lowers these
    by what the plans unmask.
    """
    requests, head_rows = [], 0
    for i, plan in enumerate(batch.plans):
        request_id, layout = batch.request_ids[i], batch.canvases[i].spec.layout
        left = masked.get(request_id, plan.window.size)
        head_rows += min(left, plan.quota.candidates.size)
        masked[request_id] = left - min(left, plan.quota.count)
        rows = layer_pass.rows_computed(i, batch.sizes[i], results)
        keys = attended_keys(
            plan,
            rows,
            layout.visible(plan.window).size,
            layout.block_length if layout.is_block_causal else None,
        )
        requests.append((rows, keys))
    return ObservedPass(batch.plans, PassShape(tuple(sorted(requests)), head_rows))


class InnerTimes(NamedTuple):
    """Seconds that a dispatch spent in its parts."""

    model: float
    """Embedding, layers, final norm and head."""
    statistics: float
    """From logits to tokens and their confidences."""


@contextmanager
def inner_times(llm: LLM) -> Iterator[Callable[[], InnerTimes]]:
    """While it watches, a function that returns the times since it was called last. On a
    GPU, a step takes longer while it watches.
    """
    runner = runner_of(llm)
    model = runner.model
    with (
        watched(runner.denoiser, "forward") as layers,
        watched(model.final_norm, "forward") as norm,
        # Rather than `compute_logits`, which the predictor keeps a reference to.
        watched(model.lm_head.quant_method, "apply") as head,
        watched(runner.rank.predictor, "predict") as prediction,
    ):

        def take() -> InnerTimes:
            last = sum(norm) + sum(head)
            times = InnerTimes(sum(layers) + last, sum(prediction) - last)
            for seconds in (layers, norm, head, prediction):
                seconds.clear()
            return times

        yield take
