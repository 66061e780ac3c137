"""How long ``dllm generate`` takes on the demo model, beside the least that vLLM takes:
its own imports, and the start of an engine for the same model.

    python benchmarks/start.py [--rounds 3]

Prints seconds of processor time, which other programs on the machine do not change, and
of the clock, as medians of rounds that alternate.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

VLLM = """
from vllm import LLM
llm = LLM({model!r}, max_model_len=512, enforce_eager=True)
"""
"""vLLM's imports, and its start of an engine for this model."""
DLLM = [str(Path(sys.executable).parent / "dllm"), "generate", "Reverse: Rome Tom Oslo"]


def seconds_of(command: list[str]) -> tuple[float, float]:
    """Processor time and clock time of a program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    subprocess.run(
        command, env=os.environ | variables, check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return processor, time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    from dllm_engine.demo import model_path

    source = VLLM.format(model=model_path("demo"))
    programs = {
        "vLLM's imports and engine": [sys.executable, "-c", source],
        "dllm generate": DLLM,
    }
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, command in programs.items():
            measured[name].append(seconds_of(command))
    medians = {
        name: [statistics.median(values) for values in zip(*times, strict=True)]
        for name, times in measured.items()
    }
    for name, (processor, clock) in medians.items():
        print(f"{name:28}{processor:6.1f} s of a processor{clock:8.1f} s")
    (own, _), (whole, _) = medians.values()
    print(f"{'ratio':28}{whole / own:6.2f}")


if __name__ == "__main__":
    main()
