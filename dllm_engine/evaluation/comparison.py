"""Comparisons: cache methods and unmasking rules on the same examples, one engine after the other."""

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dllm_engine.demo.tasks import Example
from dllm_engine.evaluation.score import TaskScore, score_task

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams

LoadEngine = Callable[[dict[str, Any]], "LLM"]
"""Starts an engine with arguments of ``LLM``."""
COLUMNS = (
    "METHOD",
    "UNMASKING",
    "EXACT",
    "±",
    "ITEMS",
    "FORWARDS/ANSWER",
    "TOKENS/FORWARD",
    "COMPUTED/TOKEN",
    "TOKENS/S",
)
NUM_WARMUP = 4
"""Examples per task that an engine answers before it is timed."""


@dataclass(frozen=True)
class Combination:
    """A cache method with an unmasking rule."""

    cache_method: str
    rule: str
    engine: dict[str, Any]
    """Arguments of ``LLM``."""
    decoding: dict[str, Any]
    """Arguments of ``DiffusionParams``."""

    @property
    def is_guided(self) -> bool:
        """Whether a guide decides what a step fills."""
        return self.engine.get("guide_model") is not None and self.decoding.get("guided") is not False

    def params(self) -> "DiffusionParams":
        """Raises ``ValueError`` naming what is out of range."""
        from dllm_engine.params import DiffusionParams

        return DiffusionParams(**self.decoding)


@dataclass(frozen=True)
class ComparedScore:
    """Results of one combination over all tasks. Rates are fractions."""

    cache_method: str
    unmasking: str
    exact_match: float
    exact_match_error: float
    """Standard error of the exact match; the examples of each task are a random sample."""
    item_match: float
    forwards_per_answer: float
    """What counts for the reader: several blocks at once also fill tokens behind the end of an answer."""
    forwards_per_token: float
    computed_per_token: float
    tokens_per_second: float
    tasks: list[TaskScore]

    @classmethod
    def of(cls, combination: Combination, tasks: list[TaskScore]) -> "ComparedScore":
        """Matches are means over examples, costs are means over tokens."""
        examples, tokens = sum(task.examples for task in tasks), sum(task.tokens for task in tasks)
        forwards = sum(task.forwards_per_token * task.tokens for task in tasks)
        return cls(
            cache_method=combination.cache_method,
            unmasking=combination.rule,
            exact_match=sum(task.exact_match * task.examples for task in tasks) / examples,
            exact_match_error=math.sqrt(
                sum(task.exact_match * (1 - task.exact_match) * task.examples for task in tasks)
            )
            / examples,
            item_match=sum(task.item_match * task.examples for task in tasks) / examples,
            forwards_per_answer=forwards / examples,
            forwards_per_token=forwards / tokens,
            computed_per_token=sum(task.computed_per_token * task.tokens for task in tasks) / tokens,
            tokens_per_second=tokens / sum(task.seconds for task in tasks),
            tasks=tasks,
        )

    def row(self) -> tuple[str, ...]:
        return (
            self.cache_method,
            self.unmasking,
            f"{self.exact_match:.1%}",
            f"{self.exact_match_error:.1%}",
            f"{self.item_match:.1%}",
            f"{self.forwards_per_answer:.2f}",
            f"{1 / self.forwards_per_token:.2f}",
            f"{self.computed_per_token:.1f}",
            f"{self.tokens_per_second:.0f}",
        )


class OneEngine:
    """The engine that runs, of those that are asked for one after the other: a device holds one at a time."""

    def __init__(self, load: LoadEngine) -> None:
        self._load = load
        self._llm: LLM | None = None
        self._arguments: dict[str, Any] | None = None

    def runs(self, arguments: dict[str, Any]) -> bool:
        """Whether the running engine has these arguments of ``LLM``."""
        return self._arguments == arguments

    def of(self, arguments: dict[str, Any]) -> "LLM":
        """The engine with these arguments of ``LLM``; another one is stopped first."""
        if self._llm is None or not self.runs(arguments):
            self.stop()
            self._llm = self._load(arguments)
            self._arguments = arguments
        return self._llm

    def stop(self) -> None:
        """End the running engine, if there is one."""
        llm, self._llm, self._arguments = self._llm, None, None
        if llm is not None:
            _stop(llm)
            del llm
            gc.collect()


def engines(wanted: list[Combination], load: LoadEngine) -> "Iterator[tuple[LLM, list[Combination]]]":
    """An engine per cache method, with the combinations to run on it before the next engine is asked for."""
    by_method: dict[str, list[Combination]] = {}
    for combination in wanted:
        by_method.setdefault(combination.cache_method, []).append(combination)
    engine = OneEngine(load)
    for of_method in by_method.values():
        yield engine.of(of_method[0].engine), of_method
        engine.stop()


def compare(wanted: list[Combination], examples: dict[str, list[Example]], load: LoadEngine) -> Iterator[ComparedScore]:
    """Score each combination on the examples of each task."""
    with tqdm(total=len(wanted), desc="Combinations", unit="", leave=False) as bar:
        for llm, of_method in engines(wanted, load):
            for combination in of_method:
                llm.check_params(combination.params())
            for of_task in examples.values():
                score_task(llm, of_task[:NUM_WARMUP], of_method[0].params())
            for combination in of_method:
                params = combination.params()
                yield ComparedScore.of(combination, [score_task(llm, of_task, params) for of_task in examples.values()])
                bar.update()


def _stop(llm: "LLM") -> None:
    """A device holds one engine at a time, and an engine that ends takes vLLM's process groups along."""
    llm.llm_engine.engine_core.shutdown()
