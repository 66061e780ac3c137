"""A look inside an engine of this process: which forward passes each dispatch ran, and how long the model took."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dllm_engine.bench.floor import PassShape
from dllm_engine.bench.machine import now, synchronize
from dllm_engine.scheduler.step_plan import RefreshState, Scope, StepPlan

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.model_executor.model_runner import DiffusionModelRunner
    from dllm_engine.scheduler.diffusion_scheduler import DiffusionScheduler


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
class ForwardPass:
    """One forward pass of a batch."""

    request_ids: list[str]
    plans: list[StepPlan]
    shape: PassShape

    @property
    def kind(self) -> str | None:
        """``whole`` where every request computes its whole canvas, ``reuse`` where every one reuses; None: mixed, or
        an update of less than the canvas."""
        if all(plan.scope is Scope.ALL for plan in self.plans):
            return "whole"
        if all(plan.state is RefreshState.REUSE for plan in self.plans):
            return "reuse"
        return None


class PassWatch:
    """Records the forward passes of an engine while it is entered."""

    def __init__(self, llm: "LLM") -> None:
        self._runner, self._scheduler = runner_of(llm), scheduler_of(llm)
        self._seen: list[tuple[Any, Any]] = []
        self._masked: dict[str, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        denoiser = self._runner.denoiser
        forward = denoiser.forward

        def recording(batch: Any, layer_pass: Any) -> Any:
            self._seen.append((batch, layer_pass))
            return forward(batch, layer_pass)

        setattr(denoiser, "forward", recording)  # noqa: B010 - mypy lets nobody assign to a method
        try:
            yield
        finally:
            setattr(denoiser, "forward", forward)  # noqa: B010

    def before_dispatch(self) -> None:
        """To be called before each ``LLMEngine.step``: notes how many tokens each block has masked."""
        self._masked = {i: state.progress.num_masked for i, state in self._scheduler.states.items()}

    def take(self) -> list[ForwardPass]:
        """The passes since the last call.

        Masked rows are those at the dispatch's start; where it ran several passes, each later one is taken to have as
        many fewer as its plans' quotas say.
        """
        seen, self._seen = self._seen, []
        masked = dict(self._masked)
        passes = []
        for batch, layer_pass in seen:
            head_rows = 0
            for request_id, plan in zip(batch.request_ids, batch.plans, strict=True):
                left = masked.get(request_id, plan.block.size)
                head_rows += min(left, plan.quota.candidates.size)
                masked[request_id] = left - min(left, plan.quota.count)
            rows = [layer_pass.rows_computed(i, batch.num_rows(i)) for i in range(len(batch.plans))]
            canvases = [canvas.spec.canvas_length for canvas in batch.canvases]
            shape = PassShape.of_plans(batch.plans, rows, canvases, head_rows)
            passes.append(ForwardPass(list(batch.request_ids), list(batch.plans), shape))
        return passes


@dataclass(frozen=True)
class InnerTimes:
    """Seconds that a dispatch spent in its parts."""

    model: float
    """Embedding, layers, final norm and head."""
    statistics: float
    """From logits to tokens and their confidences."""


class InnerTime:
    """Adds up the time inside the model and inside the token statistics while it watches.

    On a GPU it waits for the device before and after each, so a step takes longer while it watches.
    """

    def __init__(self, llm: "LLM") -> None:
        runner = runner_of(llm)
        # The head's product rather than `compute_logits`, which the predictor keeps a reference to.
        self._parts: list[tuple[str, Any, str]] = [
            ("layers", runner.denoiser, "forward"),
            ("head", runner.model.final_norm, "forward"),
            ("head", runner.model.lm_head.quant_method, "apply"),
            ("prediction", runner.predictor, "predict"),
        ]
        self._seconds: dict[str, float] = defaultdict(float)

    def take(self) -> InnerTimes:
        """Since the last call."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return InnerTimes(seconds["layers"] + seconds["head"], seconds["prediction"] - seconds["head"])

    @contextmanager
    def watching(self) -> Iterator[None]:
        originals = [getattr(owner, name) for _, owner, name in self._parts]
        for (part, owner, name), original in zip(self._parts, originals, strict=True):
            setattr(owner, name, self._timed(part, original))
        try:
            yield
        finally:
            for (_, owner, name), original in zip(self._parts, originals, strict=True):
                setattr(owner, name, original)

    def _timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            start = now()
            out = work(*args, **kwargs)
            synchronize()
            self._seconds[part] += now() - start
            return out

        return timed
