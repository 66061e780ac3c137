"""Tasks of lm-evaluation-harness."""

import os
import statistics
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dllm_engine.evaluation.comparison import Result, Task
from dllm_engine.evaluation.likelihood import NUM_SAMPLES
from dllm_engine.evaluation.runner import MeasuredEngine
from dllm_engine.text import one_line


@dataclass(frozen=True)
class HarnessTask(Task):
    """A task or group of tasks of lm_eval, by name or YAML file, with settings."""

    num_fewshot: int | None = None
    metric: str | None = None
    max_prompt_tokens: int | None = None
    with_chat_template: bool = True
    """Use the tokenizer's chat template, if it has one."""
    add_bos_token: bool | None = None
    """Begin prompts with the BOS token; None: as the tokenizer does."""
    seed: int = 0
    """Seed of the masks for likelihoods."""
    mc_num: int = NUM_SAMPLES
    """Number of masks per continuation."""
    count: int | None = None
    """Number of examples; None: all."""
    include_path: Path | None = None
    """Folder with more tasks."""
    confirm_run_unsafe_code: bool = False
    """Run the programs that a model writes."""

    @property
    def digest(self) -> str:
        return (
            "" if self.add_bos_token is None else f"add_bos_token={self.add_bos_token}"
        )

    def check(self) -> None:
        """Raise ``ValueError`` if the task is unknown, or its data is missing."""
        try:
            self._manager.load([self.name])
        except KeyError as error:
            raise ValueError(
                f"lm_eval knows no task {self.name!r}; name one of `lm_eval ls tasks`, "
                f"a YAML file, or the folder of your own tasks with --include-path"
            ) from error
        except (OSError, ImportError, AssertionError) as error:
            raise ValueError(
                f"task {self.name!r} cannot be loaded: {one_line(error)}. Its data "
                f"must be at hand: load the task once where the data set can be "
                f"reached, and set HF_HOME to that cache (and HF_HUB_OFFLINE=1), or "
                f"point the task's YAML file to local files; docs/evaluation.md shows "
                f"how"
            ) from error

    def score(self, engine: MeasuredEngine, decoding: dict[str, Any]) -> Result:
        import lm_eval

        from dllm_engine.evaluation.lm_eval_model import DiffusionLM

        settings = {
            "max_prompt_tokens": self.max_prompt_tokens,
            "add_bos_token": self.add_bos_token,
            "mc_num": self.mc_num,
            "mc_seed": self.seed,
        }
        chat = self.with_chat_template and engine.llm.has_chat_template
        if self.confirm_run_unsafe_code:
            os.environ["HF_ALLOW_CODE_EVAL"] = (
                "1"  # the same consent for the library that runs the code
            )
        results: dict[str, Any] = lm_eval.simple_evaluate(
            DiffusionLM(engine.llm, answer=engine.complete, **settings | decoding),
            tasks=[self.name],
            limit=self.count,
            num_fewshot=self.num_fewshot,
            task_manager=self._manager,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            confirm_run_unsafe_code=self.confirm_run_unsafe_code,
            log_samples=False,
        )
        details = {"num_fewshot": results["n-shot"]}
        entries = results["results"] | (results.get("groups") or {})
        for name, entry in entries.items():
            details[name] = {key: value for key, value in entry.items() if "," in key}
        counts = [samples["effective"] for samples in results["n-samples"].values()]
        figures = headline(results, self.name, self.metric)
        return Result(*figures, sum(counts), details)

    @property
    def _manager(self) -> Any:
        return task_manager(self.include_path, self.name.endswith(".yaml"))


@cache
def task_manager(include_path: Path | None, is_file: bool) -> Any:
    """lm_eval's index of tasks. Indexing its own tasks takes seconds, and is not needed
    for a task in a file.
    """
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=not is_file)


def check_lm_eval() -> None:
    """Raise ``ValueError`` if lm_eval is not installed."""
    if find_spec("lm_eval") is None:
        raise ValueError(
            "lm_eval is not installed; run pip install '.[eval]' in a checkout"
        )


def headline(
    results: dict[str, Any], name: str, metric: str | None
) -> tuple[str, float, float | None]:
    """(metric, score, standard error) of a task or a group. A group without a score
    gets the mean over its tasks, weighted by examples. ``metric``: lm_eval's
    ``metric,filter``; None: the first one."""
    groups = results.get("groups") or {}
    examples = results["n-samples"]
    entries = (
        {name: groups[name]}
        if name in groups
        else {task: results["results"][task] for task in examples}
    )
    first = next(iter(entries.values()))
    known = [key for key in first if "," in key and "_stderr," not in key]
    chosen = metric or next(iter(known), "")
    if chosen not in known:
        raise ValueError(
            f"task {name!r} has no metric {metric!r}; choose one of {' '.join(known)}"
        )
    scores = [float(entry[chosen]) for entry in entries.values()]
    if len(scores) > 1:
        weights = [examples[task]["effective"] for task in entries]
        return chosen, statistics.fmean(scores, weights), None
    stderr = first.get(chosen.replace(",", "_stderr,", 1))
    is_known = isinstance(stderr, float | int)
    return chosen, scores[0], float(stderr) if is_known else None
