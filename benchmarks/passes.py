"""A look inside an engine of this process: the forward passes that each dispatch ran,
and the time in the model.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

from floor import PassShape
from timing import timed

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
    head_rows = 0
    for request_id, plan in zip(batch.request_ids, batch.plans, strict=True):
        left = masked.get(request_id, plan.window.size)
        head_rows += min(left, plan.quota.candidates.size)
        masked[request_id] = left - min(left, plan.quota.count)
    rows = [
        layer_pass.rows_computed(i, batch.sizes[i], results)
        for i in range(len(batch.plans))
    ]
    specs = [canvas.spec for canvas in batch.canvases]
    canvases = [
        spec.layout.visible(plan.window).size
        for spec, plan in zip(specs, batch.plans, strict=True)
    ]
    blocks = [
        spec.layout.block_length if spec.layout.is_block_causal else None
        for spec in specs
    ]
    return ObservedPass(
        list(batch.plans),
        PassShape.of_plans(batch.plans, rows, canvases, head_rows, blocks),
    )


class InnerTimes(NamedTuple):
    """Seconds that a dispatch spent in its parts."""

    model: float
    """Embedding, layers, final norm and head."""
    statistics: float
    """From logits to tokens and their confidences."""


class InnerTime:
    """Adds up the time inside the model and inside the token statistics while it
    watches.

    On a GPU it waits for the device before and after each, so a step takes longer while
    it watches.
    """

    def __init__(self, llm: LLM) -> None:
        runner = runner_of(llm)
        # The head's product rather than `compute_logits`, which the predictor keeps a
        # reference to.
        self._parts: list[tuple[str, Any, str]] = [
            ("layers", runner.denoiser, "forward"),
            ("head", runner.model.final_norm, "forward"),
            ("head", runner.model.lm_head.quant_method, "apply"),
            ("prediction", runner.rank.predictor, "predict"),
        ]
        self._seconds: dict[str, float] = defaultdict(float)

    def take(self) -> InnerTimes:
        """Since the last call."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return InnerTimes(
            seconds["layers"] + seconds["head"], seconds["prediction"] - seconds["head"]
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as patches:
            for part, owner, name in self._parts:
                patches.enter_context(
                    mock.patch.object(
                        owner, name, self._counted(part, getattr(owner, name))
                    )
                )
            yield

    def _counted(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            out, seconds = timed(lambda: work(*args, **kwargs))
            self._seconds[part] += seconds
            return out

        return counted
