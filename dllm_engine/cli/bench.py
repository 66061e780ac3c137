"""Measure speed and memory of the cache methods.

Measures every cache method with every way of unmasking, batch and prompt length, several times each, one engine after
the other. Prompts are random tokens, and end tokens are ignored: `dllm eval` measures the speed on tasks. The model is
a checkpoint, or random weights of a shape such as ``llada-8b``, or ``llada-8b/4`` with a quarter of width, heads,
layers and vocabulary.
"""

import argparse
import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_engine.checkpoints import is_named_shape, load_config, named_shape
from dllm_engine.cli.arguments import add_value, positive_int, positive_ints, whole_number
from dllm_engine.cli.engine import given, load
from dllm_engine.cli.evaluate import add_comparison_arguments, combinations, finish, subject_of
from dllm_engine.evaluation.comparison import COST_COLUMNS, Comparison, Result, Row, Task, table
from dllm_engine.evaluation.runner import MeasuredEngine, Request
from dllm_engine.memory import canvas_limit

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

DEFAULTS: dict[str, Any] = {"batch": [1, 8], "prompt": [128, 512], "gen_length": 64, "unmasking_rules": "one"}
QUICK: dict[str, Any] = {"batch": [1, 4], "prompt": [64], "gen_length": 32, "unmasking_rules": "one,tokens_per_step=4"}
COLUMNS = {
    **{name.upper(): (name, "") for name in ("method", "unmasking", "batch", "prompt")},
    "TOKENS/S": ("score", ".1f"),
    "LOWEST": ("lowest", ".1f"),
    "HIGHEST": ("highest", ".1f"),
    "× NONE": ("over_none", ".2f"),
    "1ST BLOCK S": ("first_block_seconds", ".3f"),
    "LATENCY S": ("latency_seconds", ".3f"),
    **{title: column for title, column in COST_COLUMNS.items() if title != "TOKENS/S"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a first look: short prompts and responses, small batches")
    add_value(parser, "--batch --batch-size", positive_ints, "N,…", "requests at once (default: 1,8)")
    add_value(parser, "--prompt --input-len", positive_ints, "N,…", "prompt tokens (default: 128,512)")
    add_value(parser, "--repeats", positive_int, "N", "measured rounds", default=3)
    add_value(parser, "--output", Path, "FILE.json", "write each row as it is measured")
    add_comparison_arguments(parser)
    add_value(parser, "--unmasking", str, "RULE,…", "as --unmasking-rules", dest="unmasking_rules")
    add_value(parser, "--response --output-len", whole_number, "N", "as --gen-length", dest="gen_length")
    parser.set_defaults(methods="all", seed=0)


def run(args: argparse.Namespace) -> int:
    preset = QUICK if args.quick else DEFAULTS
    vars(args).update(preset | given(args, preset))
    longest = max(args.prompt), args.gen_length, args.block_length, args.max_model_len
    args.max_model_len = canvas_limit(load_config(args.model), *longest)
    args.engine_arg = [("max_num_batched_tokens", max(args.batch) * args.max_model_len), *args.engine_arg]
    workloads = [
        Workload(f"{batch} × {prompt}", batch, prompt, args.repeats, args.seed)
        for prompt, batch in itertools.product(args.prompt, args.batch)
    ]
    start = (lambda arguments: random_engine(**arguments)) if is_named_shape(args.model) else load
    comparison = Comparison(args.output, args.command, subject_of(args), start)
    comparison.add(combinations(args, max(args.batch)), workloads)
    try:
        comparison.run()
    finally:
        comparison.stop()
        if comparison.scored:
            from dllm_engine.evaluation.hardware import machine_line, provenance

            print(machine_line(provenance()), table(values_of(comparison.scored), COLUMNS), sep="\n\n")
            finish(args, comparison)
    return 1 if comparison.errors else 0


@dataclass(frozen=True)
class Workload(Task):
    """So many requests at once, with prompts of so many tokens, in so many rounds."""

    batch: int
    prompt: int
    repeats: int
    seed: int

    def score(self, engine: MeasuredEngine, decoding: dict[str, Any]) -> Result:
        """The median of the rounds' tokens per second."""
        requests = self.requests(engine.llm, decoding)
        rates = [engine.complete(requests)[1].tokens_per_second for _ in range(self.repeats)]
        about = {"batch": self.batch, "prompt": self.prompt, "lowest": min(rates), "highest": max(rates)}
        return Result("tokens/s", statistics.median(rates), None, len(requests), about)

    def requests(self, llm: "LLM", decoding: dict[str, Any]) -> list[Request]:
        """Random tokens, with end tokens ignored, so that each row does the same work."""
        from dllm_engine.params import DiffusionParams

        config, rng = llm.model_config.hf_config, random.Random(self.seed)
        tokens = [token for token in range(llm.model_config.get_vocab_size()) if token != config.mask_token_id]
        params = DiffusionParams(**decoding | {"ignore_eos": True})
        return [(rng.choices(tokens, k=self.prompt), params) for _ in range(self.batch)]


def random_engine(model: str, **settings: Any) -> "LLM":
    """An engine of a named shape with random weights, without tokenizer; ``settings`` are those of ``LLM``."""
    from dllm_engine.llm import LLM

    with tempfile.TemporaryDirectory(prefix="dllm-shape-") as name:
        (Path(name) / "config.json").write_text(json.dumps(named_shape(model)), encoding="utf-8")
        return LLM(model=name, load_format="dummy", skip_tokenizer_init=True, **settings)


def values_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The values of each row, and its speed over that without a cache."""
    plain = {(row.unmasking, row.task): row.result.score for row in rows if row.method == "none"}
    values = []
    for row in rows:
        none = plain.get((row.unmasking, row.task))
        values.append(row.values | {"over_none": row.result.score / none if none else None})
    return values
