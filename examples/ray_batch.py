"""Answer a file of prompts with several replicas of a model under Ray Data, resumable.

python examples/ray_batch.py prompts.jsonl answers.jsonl --replicas 2
python examples/ray_batch.py prompts.jsonl answers.jsonl --model GSAI-ML/LLaDA-8B-Instruct --cache-method sparse

An input line is a JSON object with a `prompt` (text) or `messages`, an `id` if wanted, and any fields of
DiffusionParams: `{"id": "a", "prompt": "Reverse: Rome Tom Oslo", "gen_length": 32, "block_length": 8}`. An output line
is its record, with `text` or, where the line cannot be answered, `error`. Run again, the same command answers what is
missing; it refuses an output of another input or of other settings. Exit status 1: some lines have errors.

Install it with `pip install "dllm-engine[ray]"` beside vLLM. A running cluster is used where RAY_ADDRESS names one.
Each replica takes a GPU where the cluster has any, else `--cpus-per-replica` CPUs.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.data

from dllm_engine.cli.batch import InputLine, ResultFile, parse_request, read_input, settings_digest
from dllm_engine.cli.engine import add_cache_arguments, engine_options, positive_int
from dllm_engine.cli.errors import CommandError, one_line

NOT_PARAMS = ("id", "prompt", "messages")


class Replica:
    """An engine in a Ray actor of its own; answers a batch of lines at a time."""

    def __init__(self, model: str, options: dict[str, Any], threads: int) -> None:
        # Read when vLLM is imported: engine and actor share a process, so that Ray sees it die.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # replicas would all bind to the same cores
        os.environ["OMP_NUM_THREADS"] = str(threads)
        from dllm_engine import LLM

        self.llm = LLM(model, use_tqdm_on_load=False, **options)
        self.has_template = bool(getattr(self.llm.get_tokenizer(), "chat_template", None))

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """From columns `index` and `line` to a column `record`, JSON, in any order."""
        lines = [InputLine(int(i), text.encode()) for i, text in zip(batch["index"], batch["line"], strict=True)]
        return {"record": [json.dumps(record) for record in self.answer(lines)]}

    def answer(self, lines: list[InputLine]) -> Iterator[dict[str, Any]]:
        """A record per line, with its `index`. What is wrong with a line is in its own record only."""
        running: dict[str, int] = {}
        for line in lines:
            try:
                running[self.enqueue(line)] = line.index
            except Exception as error:
                yield {"index": line.index, "error": one_line(error)}
        while running:
            for output in self.llm.llm_engine.step():
                if output.finished:
                    completion = output.outputs[0]
                    yield {
                        "index": running.pop(output.request_id),
                        "text": completion.text,
                        "token_ids": list(completion.token_ids),
                        "finish_reason": completion.finish_reason,
                        "figures": completion.diffusion.to_json(),
                    }

    def enqueue(self, line: InputLine) -> str:
        """Hand a line's request to the engine; returns the id under which it comes back."""
        from dllm_engine import DiffusionParams

        request = parse_request(line)
        fields = {key: value for key, value in json.loads(line.text).items() if key not in NOT_PARAMS}
        for name in fields.keys() - set(DiffusionParams.__struct_fields__):
            raise ValueError(
                f"unknown field {name!r}; beside {', '.join(NOT_PARAMS)} a line has DiffusionParams' fields"
            )
        params = DiffusionParams(**fields)
        if params.n != 1:
            raise ValueError(f"n={params.n}: a line has one answer; repeat the line")
        if request.messages is not None or self.has_template:
            messages = request.messages or [{"role": "user", "content": request.prompt}]
            (engine_id,) = self.llm.enqueue_chat(messages, params, use_tqdm=False)
        else:
            (engine_id,) = self.llm.enqueue([request.prompt], params, use_tqdm=False)
        return str(engine_id).split("-")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, metavar="INPUT", help="JSON lines")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="JSON lines; an existing one is gone on with")
    parser.add_argument("--model", default="demo", help="folder or Hugging Face name (default: the demo model)")
    parser.add_argument("--replicas", type=positive_int, default=1, metavar="N", help="engines (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=positive_int, default=32, metavar="N", help="lines per engine at once (%(default)s)"
    )
    parser.add_argument("--cpus-per-replica", type=positive_int, default=1, metavar="N", help="without GPUs (1)")
    parser.add_argument("--max-model-len", type=positive_int, metavar="N", help="most tokens of prompt and response")
    add_cache_arguments(parser)
    args = parser.parse_args()
    try:
        return answer_file(args)
    except (CommandError, ValueError) as error:
        print(f"ray_batch: error: {one_line(error)}", file=sys.stderr)
        return 2


def answer_file(args: argparse.Namespace) -> int:
    """Answer what the output lacks; returns the exit status."""
    options = engine_options(args) | ({"max_model_len": args.max_model_len} if args.max_model_len else {})
    lines = read_input(args.input)
    with ResultFile(args.output, lines, settings_digest({"model": args.model, **options})) as results:
        total, resumed = len(results.pending), results.num_resumed
        if total:
            pending = {line.index: line for line in results.pending}
            for number, record in enumerate(answer_on_replicas(args, options, results.pending), start=1):
                line = pending[record.pop("index")]
                results.append([results.record(line, _id_of(line), **record)])
                print(f"\r{resumed + number} of {resumed + total} lines", end="", file=sys.stderr, flush=True)
        print(f"\nanswered: {total}, before: {resumed}, errors: {results.num_errors}", file=sys.stderr)
        return 1 if results.num_errors else 0


def answer_on_replicas(
    args: argparse.Namespace, options: dict[str, Any], lines: list[InputLine]
) -> Iterator[dict[str, Any]]:
    """Records as the replicas finish them. Ray runs a batch again whose replica died."""
    replicas = min(args.replicas, -(-len(lines) // args.batch_size))
    if not ray.is_initialized():
        # One CPU more than the replicas take, for Ray Data's own work.
        local = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": replicas * args.cpus_per_replica + 1}
        ray.init(log_to_driver=False, logging_level="ERROR", **local)
    ray.data.DataContext.get_current().enable_progress_bars = False
    with_gpus = ray.cluster_resources().get("GPU", 0) > 0
    rows = [{"index": line.index, "line": line.text.decode(errors="replace")} for line in lines]
    records = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // args.batch_size)).map_batches(
        Replica,
        fn_constructor_args=(args.model, options, args.cpus_per_replica),
        batch_size=args.batch_size,
        compute=ray.data.ActorPoolStrategy(size=replicas),
        **({"num_gpus": 1} if with_gpus else {"num_cpus": args.cpus_per_replica}),
    )
    for row in records.iter_rows():
        yield json.loads(row["record"])


def _id_of(line: InputLine) -> str | int | None:
    """Of a line that may be bad in other ways."""
    try:
        return parse_request(line).id
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(main())
