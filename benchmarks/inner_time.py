"""How long the model takes of each dispatch of an engine in this process."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from timing import timed

from dllm_engine import LLM
from dllm_engine.evaluation.runner import runner_of


class InnerTimes(NamedTuple):
    """Seconds that a dispatch spent in its parts."""

    model: float
    """Embedding, layers, final norm and head."""
    statistics: float
    """From logits to tokens and their confidences."""


class InnerTime:
    """Adds up the time inside the model and inside the token statistics while it watches.

    On a GPU it waits for the device before and after each, so a step takes longer while it watches.
    """

    def __init__(self, llm: LLM) -> None:
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
        with ExitStack() as patches:
            for part, owner, name in self._parts:
                patches.enter_context(mock.patch.object(owner, name, self._counted(part, getattr(owner, name))))
            yield

    def _counted(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            out, seconds = timed(lambda: work(*args, **kwargs))
            self._seconds[part] += seconds
            return out

        return counted
