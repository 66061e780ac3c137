"""``dllm eval``: how many of the demo tasks a model solves, and what that costs.

Not ``eval.py``: the module would hide Python's function from its importers.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_engine.cli.engine import (
    DEMO_LENGTHS,
    add_decoding_arguments,
    add_engine_arguments,
    has_chat_template,
    positive_int,
    start_engine,
)
from dllm_engine.cli.errors import CommandError
from dllm_engine.cli.table import format_table
from dllm_engine.demo.tasks import TASKS, Example, exact_match, item_matches, make_examples

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams

COLUMNS = ("TASK", "PROMPT TOKENS", "EXAMPLES", "EXACT", "ITEMS", "FORWARDS/TOKEN", "SECONDS")


@dataclass(frozen=True)
class TaskScore:
    """Results on one task. Rates are fractions."""

    task: str
    min_prompt_tokens: int
    max_prompt_tokens: int
    examples: int
    exact_match: float
    """Responses that are the answer, nothing missing and nothing more."""
    item_match: float
    """Items right, of all items asked."""
    forwards_per_token: float
    seconds: float

    def row(self) -> tuple[str, ...]:
        return (
            self.task,
            f"{self.min_prompt_tokens}-{self.max_prompt_tokens}",
            str(self.examples),
            f"{self.exact_match:.1%}",
            f"{self.item_match:.1%}",
            f"{self.forwards_per_token:.2f}",
            f"{self.seconds:.1f}",
        )


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "eval",
        help="score a model on the demo tasks",
        description=f"Score a model on the tasks {', '.join(TASKS)}. Responses have 32 tokens in blocks of 8 unless "
        "asked otherwise; the same seed (default: 0) gives the same examples.",
    )
    parser.add_argument("--tasks", default=",".join(TASKS), metavar="NAME,…", help="default: %(default)s")
    parser.add_argument("--count", type=positive_int, default=50, metavar="N", help="examples per task (default: 50)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the scores and settings to FILE")
    add_decoding_arguments(parser)
    add_engine_arguments(parser)
    # The answers of these tasks fit; the seed also draws the examples.
    parser.set_defaults(run=run, seed=0, **DEMO_LENGTHS)


def run(args: argparse.Namespace) -> int:
    tasks = args.tasks.split(",")
    examples = {task: make_examples(task, args.count, args.seed) for task in tasks}
    llm, params = start_engine(args)
    scores = [score_task(llm, examples[task], params) for task in examples]
    print(format_table([COLUMNS, *(score.row() for score in scores)]))
    if args.json:
        _write_json(args.json, args, scores)
    return 0


def score_task(llm: "LLM", examples: list[Example], params: "DiffusionParams") -> TaskScore:
    """Answer the examples of one task, all at once."""
    start = time.perf_counter()
    if has_chat_template(llm):
        conversations = [[{"role": "user", "content": example.prompt}] for example in examples]
        outputs = llm.chat(conversations, params, use_tqdm=False)
    else:
        outputs = llm.generate([example.prompt for example in examples], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return score(examples, outputs, seconds)


def score(examples: list[Example], outputs: list[Any], seconds: float) -> TaskScore:
    """Compare vLLM's outputs with the examples, which are of one task and in the same order."""
    texts = [output.outputs[0].text for output in outputs]
    figures = [output.outputs[0].diffusion for output in outputs]
    lengths = [len(output.prompt_token_ids) for output in outputs]
    return TaskScore(
        task=examples[0].task,
        min_prompt_tokens=min(lengths),
        max_prompt_tokens=max(lengths),
        examples=len(examples),
        exact_match=sum(map(exact_match, texts, examples)) / len(examples),
        item_match=sum(map(item_matches, texts, examples)) / sum(len(example.items) for example in examples),
        forwards_per_token=sum(f.forward_passes for f in figures) / sum(f.tokens_unmasked for f in figures),
        seconds=seconds,
    )


def _write_json(path: Path, args: argparse.Namespace, scores: list[TaskScore]) -> None:
    unwritten = ("command", "json", "passes_on_unknown", "run", "traceback", "unknown")
    report = {
        "settings": {name: value for name, value in vars(args).items() if name not in unwritten},
        "scores": [asdict(score) for score in scores],
    }
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
