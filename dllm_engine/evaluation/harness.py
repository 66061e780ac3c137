"""Tasks of lm-evaluation-harness, scored together with what they cost."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_engine.evaluation.comparison import Combination, LoadEngine, engines
from dllm_engine.evaluation.likelihood import NUM_SAMPLES
from dllm_engine.evaluation.paper_tasks import paper_task
from dllm_engine.families import family_of
from dllm_engine.text import one_line

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

COLUMNS = (
    "METHOD", "UNMASKING", "TASK", "METRIC", "SCORE", "STDERR", "EXAMPLES", "FORWARDS/TOKEN", "COMPUTED/TOKEN",
    "TOKENS/S",
)  # fmt: skip
UNKNOWN = "-"


@dataclass(frozen=True)
class HarnessTask:
    """A task, or group of tasks, of lm_eval and how to run it."""

    name: str
    """lm_eval's name, or a YAML file."""
    num_fewshot: int | None = None
    metric: str | None = None
    decoding: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``DiffusionParams``, where a combination has none of its own."""
    max_prompt_tokens: int | None = None
    with_chat_template: bool = True
    cache_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By cache method."""


@dataclass(frozen=True)
class HarnessSettings:
    """How tasks are run, whatever the combination."""

    seed: int = 0
    """Of the masks of likelihoods."""
    mc_num: int = NUM_SAMPLES
    """Masks per continuation."""
    count: int | None = None
    """Examples per task; None: all."""
    include_path: Path | None = None
    """Folder of more tasks."""
    chat_template: bool = True
    """Whether to use the tokenizer's, where it has one."""
    confirm_run_unsafe_code: bool = False
    """Whether the programs that a model writes may run."""


@dataclass(frozen=True)
class HarnessScore:
    """Results of one combination on one task. Rates are fractions; None where no response was asked for."""

    cache_method: str
    unmasking: str
    task: str
    metric: str
    score: float
    stderr: float | None
    examples: int
    forwards_per_token: float | None
    computed_per_token: float | None
    tokens_per_second: float | None
    decoding: dict[str, Any]
    num_fewshot: dict[str, int]
    """As run, by task."""
    results: dict[str, Any]
    """All that lm_eval reports, by task."""

    def row(self) -> tuple[str, ...]:
        def text(value: float | None, form: str) -> str:
            return UNKNOWN if value is None else format(value, form)

        return (
            self.cache_method,
            self.unmasking,
            self.task,
            self.metric,
            f"{self.score:.4f}",
            text(self.stderr, ".4f"),
            str(self.examples),
            text(self.forwards_per_token, ".2f"),
            text(self.computed_per_token, ".1f"),
            text(self.tokens_per_second, ".0f"),
        )


def check_lm_eval() -> None:
    """Raise ``ValueError`` where lm_eval is missing."""
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise ValueError("lm_eval is not installed; run pip install 'dllm-engine[eval]'") from error


def tasks_of_papers(model: str, benchmarks: list[str], paper: str | None) -> list[HarnessTask]:
    """The benchmarks as a paper runs them with a model; raises ``ValueError`` for an unknown benchmark or paper."""
    from dllm_engine.checkpoints import load_config

    family, is_base = family_of(load_config(model)), "base" in model.lower()
    rows = [paper_task(benchmark, family, paper) for benchmark in benchmarks]
    return [
        HarnessTask(
            name=row.base_task if is_base and row.base_task is not None else row.task,
            num_fewshot=row.num_fewshot,
            metric=row.metric,
            decoding=row.decoding,
            max_prompt_tokens=row.max_prompt_tokens,
            with_chat_template=not is_base,
            cache_options=row.cache_options(model),
        )
        for row in rows
    ]


def run_harness(
    tasks: list[HarnessTask], wanted: list[Combination], settings: HarnessSettings, load: LoadEngine
) -> Iterator[HarnessScore]:
    """Score each combination on each task.

    Raises:
        ValueError: a task or its data is missing, an option is out of range, or a prompt does not fit.
    """
    # Check this before a model is loaded: the data is what is missing most often.
    manager = task_manager(tasks, settings.include_path)
    for task in tasks:
        check_data(manager, task.name)
    for together in _with_equal_engines(tasks):
        for llm, of_method in engines([_for_tasks(combination, together[0]) for combination in wanted], load):
            warm = False
            for combination in of_method:
                for task in together:
                    yield _score(llm, combination, task, manager, settings, warm_up=not warm)
                    warm = True


def task_manager(tasks: list[HarnessTask], include_path: Path | None) -> Any:
    """lm_eval's index of tasks, as far as these need it."""
    from lm_eval.tasks import TaskManager

    # Its index of some ten thousand tasks takes seconds, and tasks that are files are not in it.
    only_files = all(task.name.endswith(".yaml") for task in tasks)
    return TaskManager(include_path=str(include_path) if include_path else None, include_defaults=not only_files)


def check_data(manager: Any, name: str) -> dict[str, Any]:
    """lm_eval's tasks of a task or group, by name; raises ``ValueError`` where it is unknown or its data is missing."""
    try:
        tasks: dict[str, Any] = manager.load([name])["tasks"]
        return tasks
    except KeyError as error:
        raise ValueError(
            f"lm_eval knows no task {name!r}; name one of `lm_eval ls tasks`, a YAML file, or the folder of your own "
            f"tasks with --include-path"
        ) from error
    except (OSError, ImportError, AssertionError) as error:
        raise ValueError(
            f"task {name!r} cannot be loaded: {one_line(error)}. Its data must be at hand: load the task once where "
            f"the data set can be reached, and set HF_HOME to that cache (and HF_HUB_OFFLINE=1), or point the task's "
            f"YAML file to local files; docs/evaluation.md shows how"
        ) from error


def _with_equal_engines(tasks: list[HarnessTask]) -> list[list[HarnessTask]]:
    """The tasks in groups with the same cache options, so that each group shares an engine."""
    groups: dict[str, list[HarnessTask]] = {}
    for task in tasks:
        groups.setdefault(json.dumps(task.cache_options, sort_keys=True), []).append(task)
    return list(groups.values())


def _for_tasks(combination: Combination, task: HarnessTask) -> Combination:
    """The combination with the cache options of the task's paper, unless it has options of its own."""
    options = task.cache_options.get(combination.cache_method)
    if options is None or combination.engine["cache_options"]:
        return combination
    return replace(combination, engine=combination.engine | {"cache_options": options})


def decoding_of(task: HarnessTask, combination: Combination) -> dict[str, Any]:
    """Arguments of ``DiffusionParams``: the task's, overridden by the combination's. A guide has no use for a number of
    steps."""
    left_out = ("steps",) if combination.is_guided else ()
    return {name: value for name, value in task.decoding.items() if name not in left_out} | combination.decoding


def _score(
    llm: "LLM", combination: Combination, task: HarnessTask, manager: Any, settings: HarnessSettings, *, warm_up: bool
) -> HarnessScore:
    from dllm_engine.evaluation.lm_eval_model import Cost, DiffusionLM

    decoding = decoding_of(task, combination)
    model = DiffusionLM(
        llm, decoding, mc_num=settings.mc_num, mc_seed=settings.seed, max_prompt_tokens=task.max_prompt_tokens
    )
    if warm_up:
        evaluate(model, task, manager, settings, limit=1)
        model.cost = Cost()
    results, cost = evaluate(model, task, manager, settings, limit=settings.count), model.cost
    metric, score, stderr = headline(results, task.name, task.metric)
    return HarnessScore(
        cache_method=combination.cache_method,
        unmasking=combination.rule,
        task=next(iter(results["results"])) if task.name.endswith(".yaml") else task.name,
        metric=metric,
        score=score,
        stderr=stderr,
        examples=sum(samples["effective"] for samples in results["n-samples"].values()),
        forwards_per_token=cost.forward_passes / cost.tokens if cost.tokens else None,
        computed_per_token=cost.tokens_computed / cost.tokens if cost.tokens else None,
        tokens_per_second=cost.tokens / cost.seconds if cost.tokens else None,
        decoding=decoding,
        num_fewshot=results["n-shot"],
        results={
            name: {key: value for key, value in entry.items() if "," in key}
            for name, entry in (results["results"] | (results.get("groups") or {})).items()
        },
    )


def evaluate(model: Any, task: HarnessTask, manager: Any, settings: HarnessSettings, **which: Any) -> dict[str, Any]:
    """lm_eval's results of a model. ``which`` holds more arguments of lm_eval, such as ``limit`` or ``samples``."""
    import lm_eval

    chat = task.with_chat_template and settings.chat_template and model.llm.has_chat_template
    if settings.confirm_run_unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # the same consent, for the library that runs the code
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model,
        num_fewshot=task.num_fewshot,
        task_manager=manager,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        confirm_run_unsafe_code=settings.confirm_run_unsafe_code,
        **{"tasks": [task.name], "log_samples": False} | which,
    )
    return results


def headline(results: dict[str, Any], name: str, metric: str | None) -> tuple[str, float, float | None]:
    """(metric, score, standard error) of a task or a group.

    A group's own score if it has one, else the mean over its tasks, weighted by examples. ``metric`` is lm_eval's
    ``metric,filter``; None takes its first one. Raises ``ValueError`` for an unknown metric.
    """
    groups, examples = results.get("groups") or {}, results["n-samples"]
    entries = {name: groups[name]} if name in groups else {task: results["results"][task] for task in examples}
    first = next(iter(entries.values()))
    known = [key for key in first if "," in key and not key.partition(",")[0].endswith("_stderr")]
    chosen = metric or next(iter(known), None)
    if chosen is None or chosen not in known:
        raise ValueError(f"task {name!r} has no metric {metric!r}; choose one of {' '.join(known)}")
    if len(entries) == 1:
        stderr = first.get(chosen.replace(",", "_stderr,", 1))
        return chosen, float(first[chosen]), float(stderr) if isinstance(stderr, float | int) else None
    weights = {task: examples[task]["effective"] for task in entries}
    total = sum(weights[task] * float(entry[chosen]) for task, entry in entries.items())
    return chosen, total / sum(weights.values()), None
