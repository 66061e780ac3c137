"""Answer a file of prompts with several replicas of a model under Ray Data, resumable.

python examples/ray_batch.py prompts.jsonl answers.jsonl --replicas 2
python examples/ray_batch.py prompts.jsonl answers.jsonl --model GSAI-ML/LLaDA-8B-Instruct --cache-method sparse

An input line is a JSON object with a `prompt` (text) or `messages`, an `id` if wanted, and any fields of
DiffusionParams: `{"id": "a", "prompt": "Reverse: Rome Tom Oslo", "gen_length": 32, "block_length": 8}`. An output line
is its record, with `text` or, where the line cannot be answered, `error`. Run again, the same command answers what is
missing; it refuses an output of another input or of other settings. Exit status 1: some lines have errors.

Ray hands the lines to the replicas a few at a time; there they join those that run, so that batches stay full.

Install it with `pip install "dllm-engine[ray]"` beside vLLM. A running cluster is used where RAY_ADDRESS names one.
Each replica takes a GPU where the cluster has any, else `--cpus-per-replica` CPUs.
"""

import argparse
import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tqdm import tqdm

from dllm_engine.cli.batch import InputLine, ResultFile, parse_request, read_input, settings_digest
from dllm_engine.cli.engine import add_cache_arguments, engine_options, has_chat_template, positive_int
from dllm_engine.cli.errors import CommandError, one_line

NOT_PARAMS = ("id", "prompt", "messages")
START_TIMEOUT_S = 1800
LINES_PER_TASK = 8  # a replica returns them together


class Replica:
    """An engine in a Ray actor of its own."""

    def __init__(self, model: str, options: dict[str, Any], threads: int) -> None:
        # Read when vLLM is imported: engine and actor share a process, so that Ray sees it die.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # replicas would all bind to the same cores
        os.environ["OMP_NUM_THREADS"] = str(threads)
        from dllm_engine import LLM

        self.llm = LLM(model, use_tqdm_on_load=False, **options)
        self.use_chat = has_chat_template(self.llm)
        self.waiting: SimpleQueue[tuple[InputLine, Future[dict[str, Any]]]] = SimpleQueue()
        threading.Thread(target=self.run_engine, daemon=True).start()

    async def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """From columns `index` and `line` to a column `record`, JSON. Ray makes several such calls at a time."""
        answers = []
        for index, text in zip(batch["index"], batch["line"], strict=True):
            answer: Future[dict[str, Any]] = Future()
            self.waiting.put((InputLine(int(index), text.encode()), answer))
            answers.append(asyncio.wrap_future(answer))
        return {"record": [json.dumps(record) for record in await asyncio.gather(*answers)]}

    def run_engine(self) -> None:
        """Answer lines as they come. What is wrong with a line is in its own record only."""
        running: dict[str, tuple[InputLine, Future[dict[str, Any]]]] = {}
        try:
            while True:
                while not running or not self.waiting.empty():
                    line, answer = self.waiting.get()
                    try:
                        running[self.enqueue(line)] = line, answer
                    except Exception as error:
                        answer.set_result({"index": line.index, "error": one_line(error)})
                for output in self.llm.llm_engine.step():
                    if output.finished:
                        line, answer = running.pop(output.request_id)
                        completion = output.outputs[0]
                        answer.set_result(
                            {
                                "index": line.index,
                                "text": completion.text,
                                "token_ids": list(completion.token_ids),
                                "finish_reason": completion.finish_reason,
                                "figures": completion.diffusion.to_json(),
                            }
                        )
        except Exception as error:  # of the engine: it ends the run
            for _, answer in running.values():
                answer.set_exception(error)

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
        if request.messages is not None or self.use_chat:
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
        "--batch-size",
        type=positive_int,
        default=256,
        metavar="N",
        help="lines that a replica has at once (%(default)s)",
    )
    parser.add_argument("--cpus-per-replica", type=positive_int, default=1, metavar="N", help="without GPUs (1)")
    parser.add_argument("--max-model-len", type=positive_int, metavar="N", help="most tokens of prompt and response")
    add_cache_arguments(parser)
    args = parser.parse_args()
    try:
        import ray.data  # noqa: F401
    except ImportError as error:
        print(f"ray_batch: error: {error}; pip install 'dllm-engine[ray]'", file=sys.stderr)
        return 2
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
        pending = {line.index: line for line in results.pending}
        with tqdm(total=resumed + total, initial=resumed, desc="Lines", unit="") as bar:
            for record in answer_on_replicas(args, options, results.pending) if total else ():
                line = pending[record.pop("index")]
                results.append([results.record(line, _id_of(line), **record)])
                bar.update()
        print(f"answered: {total}, before: {resumed}, errors: {results.num_errors}", file=sys.stderr)
        return 1 if results.num_errors else 0


def answer_on_replicas(
    args: argparse.Namespace, options: dict[str, Any], lines: list[InputLine]
) -> Iterator[dict[str, Any]]:
    """Records as the replicas finish them. Ray runs a task again whose replica died."""
    import ray
    import ray.data

    per_task = min(LINES_PER_TASK, args.batch_size)
    num_tasks = -(-len(lines) // per_task)
    replicas = min(args.replicas, num_tasks)
    if not ray.is_initialized():
        # One CPU more than the replicas take, for Ray Data's own work.
        local = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": replicas * args.cpus_per_replica + 1}
        ray.init(log_to_driver=False, logging_level="ERROR", **local)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.wait_for_min_actors_s = START_TIMEOUT_S  # the first replica to start would take the others' lines
    with_gpus = ray.cluster_resources().get("GPU", 0) > 0
    rows = [{"index": line.index, "line": line.text.decode(errors="replace")} for line in lines]
    tasks_at_once = -(-args.batch_size // per_task)
    records = ray.data.from_items(rows, override_num_blocks=num_tasks).map_batches(
        Replica,
        fn_constructor_args=(args.model, options, args.cpus_per_replica),
        batch_size=per_task,
        compute=ray.data.ActorPoolStrategy(size=replicas, max_tasks_in_flight_per_actor=tasks_at_once),
        max_concurrency=tasks_at_once,
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
