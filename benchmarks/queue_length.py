"""What a step costs beside its model when many requests wait, and that all of them are answered.

    python benchmarks/queue_length.py [--waiting 100 10000] [--output FILE.json]

Requests of one block run on a model so small that a step is mostly scheduling and messages. Per queue length: the
median time of a step with the batch full, while at least half of the queue still waits.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from random_engine import machine, random_llada

from dllm_engine import LLM, DiffusionParams

MAX_NUM_SEQS = 16
SETTINGS = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 512, "max_model_len": 64}


def time_of_steps(llm: LLM, num_waiting: int) -> dict[str, float]:
    """Seconds to queue a request, and of a step with a full batch."""
    engine = llm.llm_engine
    params = DiffusionParams(gen_length=4, block_length=4, ignore_eos=True)
    start = time.perf_counter()
    for number in range(num_waiting):
        engine.add_request(str(number), {"prompt_token_ids": [1 + number % 400]}, params)
    queueing = (time.perf_counter() - start) / num_waiting
    times, finished = [], 0
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        finished += sum(output.finished for output in engine.step())
        if finished < num_waiting // 2:
            times.append(time.perf_counter() - start)
    assert finished == num_waiting, f"{finished} of {num_waiting} requests were answered"
    return {"waiting": num_waiting, "queueing_s": queueing, "step_s": statistics.median(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--output", type=Path, help="write settings and figures as JSON")
    options = parser.parse_args()
    llm = random_llada(**SETTINGS, dtype="float32", max_num_seqs=MAX_NUM_SEQS)
    time_of_steps(llm, 100)  # warm up
    figures = [time_of_steps(llm, num_waiting) for num_waiting in options.waiting]
    print(machine())
    print(f"{'waiting':>8} {'queue a request ms':>19} {'step ms':>8} {'over the shortest queue':>24}")
    for figure in figures:
        ratio = figure["step_s"] / figures[0]["step_s"]
        print(
            f"{figure['waiting']:>8} {figure['queueing_s'] * 1e3:>19.3f} {figure['step_s'] * 1e3:>8.3f} {ratio:>24.2f}"
        )
    if options.output:
        settings = {**SETTINGS, "max_num_seqs": MAX_NUM_SEQS}
        options.output.write_text(json.dumps({"machine": machine(), **settings, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
