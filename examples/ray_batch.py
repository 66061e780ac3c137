"""Answer a file of prompts with several replicas of a model under Ray, resumable.

python examples/ray_batch.py prompts.jsonl answers.jsonl --replicas 2 --gen-length 32
python examples/ray_batch.py prompts.jsonl answers.jsonl --model
GSAI-ML/LLaDA-8B-Instruct --cache-method sparse

Input, output and options are those of `dllm generate --input`: run again, the same
command answers what is missing. It needs `pip install ".[ray]"` beside vLLM.
A cluster is used where RAY_ADDRESS names one. A replica takes a GPU where there is any,
else an equal share of the CPUs.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.util import ActorPool
from tqdm import tqdm

from dllm_engine.batch import (
    Answer,
    InputLine,
    ResultFile,
    answer_lines,
    read_input,
    settings_digest,
)
from dllm_engine.cli.arguments import positive_int
from dllm_engine.cli.engine import (
    DECODING,
    add_cache_arguments,
    add_decoding_arguments,
    chosen_arguments,
    engine_options,
)


class Replica:
    """An engine in a Ray actor of its own."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        # Read when vLLM is imported: engine and actor share a process, so that Ray sees
        # it die.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault(
            "VLLM_CPU_OMP_THREADS_BIND", "nobind"
        )  # replicas would all bind to the same cores
        from dllm_engine import LLM

        self.llm = LLM(model, use_tqdm_on_load=False, **options)

    def answer(self, lines: list[InputLine], decoding: dict[str, Any]) -> list[Answer]:
        from dllm_engine import DiffusionParams

        params = DiffusionParams(**decoding)
        steps = answer_lines(
            self.llm, lines, params, use_chat=self.llm.has_chat_template
        )
        return [answer for answers in steps for answer in answers]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", type=Path, metavar="INPUT", help="JSON lines")
    parser.add_argument(
        "output",
        type=Path,
        metavar="OUTPUT",
        help="JSON lines; an existing one is gone on with",
    )
    parser.add_argument(
        "--model",
        default="demo",
        help="folder or Hugging Face name (default: the demo model)",
    )
    parser.add_argument(
        "--replicas",
        type=positive_int,
        default=1,
        metavar="N",
        help="engines (default: %(default)s)",
    )
    parser.add_argument(
        "--lines",
        type=positive_int,
        default=64,
        metavar="N",
        help="per task (default: %(default)s)",
    )
    add_cache_arguments(parser)
    add_decoding_arguments(parser)
    args = parser.parse_args()
    options, decoding = engine_options(args), chosen_arguments(args, DECODING)
    lines = read_input(args.input)
    with ResultFile(
        args.output,
        lines,
        settings_digest({"model": args.model, **options, **decoding}),
    ) as results:
        local = {} if "RAY_ADDRESS" in os.environ else {"include_dashboard": False}
        ray.init(log_to_driver=False, logging_level="ERROR", **local)
        there = ray.cluster_resources()
        share = (
            {"num_gpus": 1}
            if "GPU" in there
            else {"num_cpus": max(1, there["CPU"] // args.replicas)}
        )
        # A task whose replica died is tried again, but not for ever: its lines may be
        # what kills it.
        start = ray.remote(Replica).options(
            max_restarts=-1, max_task_retries=3, **share
        )
        pool = ActorPool(
            [start.remote(args.model, options) for _ in range(args.replicas)]
        )
        tasks = [
            results.pending[first : first + args.lines]
            for first in range(0, len(results.pending), args.lines)
        ]
        answers = pool.map_unordered(
            lambda replica, task: replica.answer.remote(task, decoding), tasks
        )
        for answered in tqdm(answers, total=len(tasks), desc="Tasks"):
            results.append(answered)
        print(
            f"answered: {len(results.pending)}, errors: {results.num_errors}",
            file=sys.stderr,
        )
        return 1 if results.num_errors else 0


if __name__ == "__main__":
    sys.exit(main())
