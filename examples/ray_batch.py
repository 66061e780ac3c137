"""Answer a file of prompts with several replicas of a model under Ray, resumable.

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
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tqdm import tqdm

from dllm_engine.batch.files import InputLine, ResultFile, read_input, settings_digest
from dllm_engine.batch.run import enqueue, outcome
from dllm_engine.cli.arguments import positive_int
from dllm_engine.cli.engine import add_cache_arguments, engine_options
from dllm_engine.text import one_line

NOT_PARAMS = ("id", "prompt", "messages")
LINES_PER_TASK = 8  # a replica returns them together
RETRIES = 3  # of a task whose replica died: its lines may be what kills it


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
        self.waiting: SimpleQueue[tuple[InputLine, Future[dict[str, Any]]]] = SimpleQueue()
        threading.Thread(target=self.run_engine, daemon=True).start()

    def answer(self, lines: list[InputLine]) -> list[dict[str, Any]]:
        """A record per line, with its `index`. Several such calls run at a time."""
        answers: list[Future[dict[str, Any]]] = [Future() for _ in lines]
        for line, answer in zip(lines, answers, strict=True):
            self.waiting.put((line, answer))
        return [answer.result() for answer in answers]

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
                        answer.set_result({"index": line.index, **outcome(output.outputs[0])})
        except Exception as error:  # of the engine: it ends the run
            for _, answer in running.values():
                answer.set_exception(error)

    def enqueue(self, line: InputLine) -> str:
        """Hand a line's request to the engine; returns the id under which it comes back."""
        from dllm_engine import DiffusionParams

        request = line.parse()
        fields = {key: value for key, value in json.loads(line.text).items() if key not in NOT_PARAMS}
        for name in fields.keys() - set(DiffusionParams.__struct_fields__):
            raise ValueError(
                f"unknown field {name!r}; beside {', '.join(NOT_PARAMS)} a line has DiffusionParams' fields"
            )
        params = DiffusionParams(**fields)
        if params.n != 1:
            raise ValueError(f"n={params.n}: a line has one answer; repeat the line")
        return enqueue(self.llm, request, params, use_chat=self.llm.has_chat_template)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, metavar="INPUT", help="JSON lines")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="JSON lines; an existing one is gone on with")
    parser.add_argument("--model", default="demo", help="folder or Hugging Face name (default: the demo model)")
    parser.add_argument("--replicas", type=positive_int, default=1, metavar="N", help="engines (default: %(default)s)")
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        default=512,
        metavar="N",
        help="lines that a replica has at once, running or next (%(default)s)",
    )
    parser.add_argument(
        "--cpus-per-replica",
        type=positive_int,
        metavar="N",
        help="without GPUs (default: an equal share of all but one here, 1 on a running cluster)",
    )
    parser.add_argument("--max-model-len", type=positive_int, metavar="N", help="most tokens of prompt and response")
    add_cache_arguments(parser)
    args = parser.parse_args()
    try:
        import ray
    except ImportError as error:
        print(f"ray_batch: error: {error}; pip install 'dllm-engine[ray]'", file=sys.stderr)
        return 2
    try:
        return answer_file(args)
    except KeyboardInterrupt:
        print("ray_batch: interrupted; the same command goes on where this one stopped", file=sys.stderr)
        return 130
    except ray.exceptions.RayError as error:
        # What a replica raised comes with its traceback; its last line says what it was.
        print(f"ray_batch: error: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
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
    """Records as the replicas finish them. Of a replica that dies Ray starts a new one, which repeats its tasks."""
    import ray

    num_replicas = min(args.replicas, len(lines))
    lines_at_once = min(args.batch_size, -(-len(lines) // num_replicas))
    per_task = min(LINES_PER_TASK, lines_at_once)
    tasks_at_once = -(-lines_at_once // per_task)
    tasks = deque(lines[start : start + per_task] for start in range(0, len(lines), per_task))
    has_cluster = "RAY_ADDRESS" in os.environ
    # A core is left to Ray and this program: threads that wait for a core hold up all threads of an engine.
    share = 1 if has_cluster else max(1, (len(os.sched_getaffinity(0)) - 1) // num_replicas)
    cpus = args.cpus_per_replica or share
    # Ray's dashboard would take ten processes.
    local = {} if has_cluster else {"num_cpus": num_replicas * cpus, "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level="ERROR", **local)
    with_gpus = ray.cluster_resources().get("GPU", 0) > 0
    start = ray.remote(Replica).options(
        **({"num_gpus": 1} if with_gpus else {"num_cpus": cpus}),
        max_concurrency=tasks_at_once,
        max_restarts=-1,
        max_task_retries=RETRIES,
    )
    replicas = [start.remote(args.model, options, cpus) for _ in range(num_replicas)]
    # A replica gets its first lines when it has started, which an empty task tells.
    running = {replica.answer.remote([]): replica for replica in replicas}
    num_left = len(lines)
    while num_left:
        (done,), _ = ray.wait(list(running))
        replica, records = running.pop(done), ray.get(done)
        for _ in range(min(len(tasks), 1 if records else tasks_at_once)):
            running[replica.answer.remote(tasks.popleft())] = replica
        num_left -= len(records)
        yield from records


def _id_of(line: InputLine) -> str | int | None:
    """Of a line that may be bad in other ways."""
    try:
        return line.parse().id
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(main())
