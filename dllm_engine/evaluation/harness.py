"""``dllm eval --lm-eval`` and ``--paper-task``: tasks of lm-evaluation-harness, scored with what they cost."""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dllm_engine.cli.engine import decoding_options, has_chat_template
from dllm_engine.cli.errors import CommandError, one_line
from dllm_engine.evaluation.comparison import Combination, combinations, engines
from dllm_engine.vllm_hooks.release import check_release

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
    """Of the benchmark; what the command's arguments ask for goes before it."""
    max_prompt_tokens: int | None = None
    with_chat_template: bool = True
    cache_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By cache method."""


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
    """Raise ``CommandError`` where lm_eval is missing."""
    check_release()
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise CommandError("lm_eval is not installed; run pip install 'dllm-engine[eval]'") from error


def harness_tasks(args: argparse.Namespace) -> list[HarnessTask]:
    """What ``--lm-eval`` or ``--paper-task`` asks for; raises ``ValueError`` for an unknown benchmark."""
    if args.lm_eval is not None:
        return [
            HarnessTask(name, args.num_fewshot, args.metric, max_prompt_tokens=args.max_prompt_tokens)
            for name in args.lm_eval.split(",")
        ]
    from dllm_engine.evaluation.paper_tasks import paper_task
    from dllm_engine.families import family_of
    from dllm_engine.sizing import load_config

    family, is_base = family_of(load_config(args.model)), "base" in args.model.lower()
    tasks = []
    for benchmark in args.paper_task.split(","):
        row = paper_task(benchmark, family, args.paper)
        lengths = {"gen_length": row.gen_length, "block_length": row.block_length or row.gen_length, "steps": row.steps}
        tasks.append(
            HarnessTask(
                name=row.base_task if is_base and row.base_task is not None else row.task,
                num_fewshot=row.num_fewshot if args.num_fewshot is None else args.num_fewshot,
                metric=row.metric if args.metric is None else args.metric,
                decoding=lengths,
                max_prompt_tokens=row.max_prompt_tokens if args.max_prompt_tokens is None else args.max_prompt_tokens,
                with_chat_template=not is_base,
                cache_options=row.cache_options(args.model),
            )
        )
    return tasks


def run_harness(args: argparse.Namespace) -> Iterator[HarnessScore]:
    """Score each combination on each task.

    Raises:
        CommandError: lm_eval is missing, or a task or its data.
        ValueError: options that cannot be, and prompts that do not fit.
    """
    check_lm_eval()
    tasks, wanted = harness_tasks(args), combinations(args)
    # Before a model is loaded: what is missing most often is the data.
    manager = _task_manager(tasks, args)
    for task in tasks:
        _check_data(manager, task.name)
    for together in _with_equal_engines(tasks):
        for llm, of_method in engines([_for_tasks(combination, together[0]) for combination in wanted]):
            warm = False
            for combination in of_method:
                for task in together:
                    yield _score(llm, combination, task, manager, args, warm_up=not warm)
                    warm = True


def _task_manager(tasks: list[HarnessTask], args: argparse.Namespace) -> Any:
    from lm_eval.tasks import TaskManager

    # Its index of some ten thousand tasks takes seconds, and a file is in none.
    only_files = all(task.name.endswith(".yaml") for task in tasks)
    include_path = str(args.include_path) if args.include_path is not None else None
    return TaskManager(include_path=include_path, include_defaults=not only_files)


def _check_data(manager: Any, name: str) -> None:
    try:
        manager.load([name])
    except KeyError as error:
        raise CommandError(
            f"lm_eval knows no task {name!r}; name one of `lm_eval ls tasks`, a YAML file, or the folder of your own "
            f"tasks with --include-path"
        ) from error
    except (OSError, ImportError, AssertionError) as error:
        raise CommandError(
            f"task {name!r} cannot be loaded: {one_line(error)}. Its data must be at hand: load the task once where "
            f"the data set can be reached, and set HF_HOME to that cache (and HF_HUB_OFFLINE=1), or point the task's "
            f"YAML file to local files; docs/evaluation.md shows how"
        ) from error


def _with_equal_engines(tasks: list[HarnessTask]) -> list[list[HarnessTask]]:
    """The tasks in groups that want the same cache options, which an engine has once for all."""
    groups: list[list[HarnessTask]] = []
    for task in tasks:
        for group in groups:
            if group[0].cache_options == task.cache_options:
                group.append(task)
                break
        else:
            groups.append([task])
    return groups


def _for_tasks(combination: Combination, task: HarnessTask) -> Combination:
    """The combination with the cache options that the task's paper has, unless the command names some."""
    options = task.cache_options.get(combination.cache_method)
    if options is None or combination.settings.cache_option:
        return combination
    settings = argparse.Namespace(**vars(combination.settings) | {"cache_option": list(options.items())})
    return Combination(combination.cache_method, combination.rule, settings)


def _score(
    llm: "LLM", combination: Combination, task: HarnessTask, manager: Any, args: argparse.Namespace, *, warm_up: bool
) -> HarnessScore:
    import lm_eval

    from dllm_engine.evaluation.lm_eval_model import Cost, DiffusionLM

    decoding = task.decoding | decoding_options(combination.settings)
    model = DiffusionLM(llm, decoding, mc_num=args.mc_num, mc_seed=args.seed, max_prompt_tokens=task.max_prompt_tokens)
    chat = task.with_chat_template and args.chat_template and has_chat_template(llm)
    if args.confirm_run_unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # the same consent, to the library that runs the code

    def evaluate(limit: int | None) -> dict[str, Any]:
        return lm_eval.simple_evaluate(
            model,
            tasks=[task.name],
            num_fewshot=task.num_fewshot,
            limit=limit,
            task_manager=manager,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            log_samples=False,
            confirm_run_unsafe_code=args.confirm_run_unsafe_code,
        )

    if warm_up:
        evaluate(1)
        model.cost = Cost()
    results, cost = evaluate(args.count), model.cost
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


def headline(results: dict[str, Any], name: str, metric: str | None) -> tuple[str, float, float | None]:
    """(metric, score, standard error) that stand for a task or a group.

    A group's own figure where it has one, else the mean over its tasks, by examples. ``metric`` is lm_eval's
    ``metric,filter``, and None its first. Raises ``CommandError`` for a metric that is not there.
    """
    groups, examples = results.get("groups") or {}, results["n-samples"]
    entries = {name: groups[name]} if name in groups else {task: results["results"][task] for task in examples}
    first = next(iter(entries.values()))
    known = [key for key in first if "," in key and not key.partition(",")[0].endswith("_stderr")]
    chosen = metric or next(iter(known), None)
    if chosen is None or chosen not in known:
        raise CommandError(f"task {name!r} has no metric {metric!r}; choose one of {' '.join(known)}")
    if len(entries) == 1:
        stderr = first.get(chosen.replace(",", "_stderr,", 1))
        return chosen, float(first[chosen]), float(stderr) if isinstance(stderr, float | int) else None
    weights = {task: examples[task]["effective"] for task in entries}
    total = sum(weights[task] * float(entry[chosen]) for task, entry in entries.items())
    return chosen, total / sum(weights.values()), None
