"""Comparisons: cache methods and ways of unmasking on the same examples, one engine after the other."""

import argparse
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dllm_engine.cli.arguments import key_value
from dllm_engine.cli.engine import check_for_all, decoding_params, start_engine
from dllm_engine.cli.errors import CommandError
from dllm_engine.cli.table import format_table
from dllm_engine.demo.tasks import Example
from dllm_engine.evaluation.score import TaskScore, score_task
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.methods import CACHE_METHODS

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

COLUMNS = ("METHOD", "UNMASKING", "EXACT", "±", "ITEMS", "FORWARDS/TOKEN", "COMPUTED/TOKEN", "TOKENS/S")
ONE = "one"
"""The unmasking rule of one token per step."""
RULES = ("steps", "threshold", "factor", "entropy_bound", "margin")
"""Options that another rule may set."""
NUM_WARMUP = 4
"""Examples per task that an engine answers before it is timed."""


@dataclass(frozen=True)
class Combination:
    """A cache method with an unmasking rule."""

    cache_method: str
    rule: str
    settings: argparse.Namespace
    """The command's arguments as the two of them have it."""


@dataclass(frozen=True)
class ComparedScore:
    """Results of one combination over all tasks. Rates are fractions."""

    cache_method: str
    unmasking: str
    exact_match: float
    exact_match_error: float
    """Standard error of the exact match, the examples of each task being a random sample of it."""
    item_match: float
    forwards_per_token: float
    computed_per_token: float
    tokens_per_second: float
    tasks: list[TaskScore]

    @classmethod
    def of(cls, combination: Combination, tasks: list[TaskScore]) -> "ComparedScore":
        """Examples count alike in the matches, tokens alike in the costs."""
        examples, tokens = sum(task.examples for task in tasks), sum(task.tokens for task in tasks)
        return cls(
            cache_method=combination.cache_method,
            unmasking=combination.rule,
            exact_match=sum(task.exact_match * task.examples for task in tasks) / examples,
            exact_match_error=math.sqrt(
                sum(task.exact_match * (1 - task.exact_match) * task.examples for task in tasks)
            )
            / examples,
            item_match=sum(task.item_match * task.examples for task in tasks) / examples,
            forwards_per_token=sum(task.forwards_per_token * task.tokens for task in tasks) / tokens,
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
            f"{self.forwards_per_token:.2f}",
            f"{self.computed_per_token:.1f}",
            f"{self.tokens_per_second:.0f}",
        )


def combinations(args: argparse.Namespace) -> list[Combination]:
    """What ``--methods`` and ``--unmasking-rules`` ask for; raises ``ValueError`` for what cannot be asked."""
    own = {name: getattr(args, name) for name in RULES if getattr(args, name) is not None}
    if args.unmasking_rules is None:
        rules = {",".join(f"{name}={value}" for name, value in own.items()) or ONE: own}
    elif own:
        raise CommandError(f"--unmasking-rules and --{next(iter(own)).replace('_', '-')} both say how to unmask")
    else:
        rules = {text: parse_rule(text) for text in args.unmasking_rules.split(",")}
    methods = [args.cache_method]
    if args.methods is not None:
        if args.cache_method != "none" or args.cache_option:
            raise CommandError("--methods takes the papers' settings; leave out --cache-method and --cache-option")
        methods = list(CACHE_METHODS) if args.methods == "all" else args.methods.split(",")
    made = []
    for method in methods:
        EngineOptions.parse({"cache_method": method})
        for rule, options in rules.items():
            settings = argparse.Namespace(**vars(args) | {"cache_method": method} | options)
            made.append(Combination(method, rule, settings))
    return made


def parse_rule(text: str) -> dict[str, Any]:
    """``one``, or an option and its value such as ``threshold=0.9``, as arguments of the command."""
    if text == ONE:
        return {}
    try:
        name, value = key_value(text.replace("-", "_"))
    except argparse.ArgumentTypeError:
        name, value = text, None
    if name not in RULES or value is None:
        raise CommandError(f"unmasking rule {text!r} is unknown; give {ONE} or one of {', '.join(RULES)} as NAME=VALUE")
    return {name: value}


def engines(wanted: list[Combination]) -> "Iterator[tuple[LLM, list[Combination]]]":
    """An engine per cache method, with the combinations to try on it before the next one is asked for.

    Raises ``ValueError`` at once for decoding parameters out of range.
    """
    by_method: dict[str, list[Combination]] = {}
    for combination in wanted:
        by_method.setdefault(combination.cache_method, []).append(combination)
        decoding_params(combination.settings)
    return _engines(by_method)


def _engines(by_method: dict[str, list[Combination]]) -> "Iterator[tuple[LLM, list[Combination]]]":
    for of_method in by_method.values():
        llm, _ = start_engine(of_method[0].settings)
        yield llm, of_method
        _stop(llm)
        del llm
        gc.collect()


def compare(wanted: list[Combination], examples: dict[str, list[Example]]) -> Iterator[ComparedScore]:
    """Score each combination on the examples of each task."""
    running = engines(wanted)
    with tqdm(total=len(wanted), desc="Combinations", unit="", leave=False) as bar:
        for llm, of_method in running:
            for combination in of_method:
                check_for_all(llm, decoding_params(combination.settings))
            for of_task in examples.values():
                score_task(llm, of_task[:NUM_WARMUP], decoding_params(of_method[0].settings))
            for combination in of_method:
                params = decoding_params(combination.settings)
                yield ComparedScore.of(combination, [score_task(llm, of_task, params) for of_task in examples.values()])
                bar.update()


def _stop(llm: "LLM") -> None:
    """Before the next one starts: a device holds one at a time, and one that ends takes vLLM's process groups along."""
    llm.llm_engine.engine_core.shutdown()


def comparison_table(scores: list[ComparedScore]) -> str:
    return format_table([COLUMNS, *(score.row() for score in scores)])
