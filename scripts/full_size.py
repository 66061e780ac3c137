"""Loads a checkpoint and answers: the memory at its peak and at rest, and the time beside reading the files alone.

The files are read alone, loaded into an engine in this process, and read alone again, each time with the files out of
the system's cache first. With `--cache kept` they may come from memory; the time then says what loading computes.

    python scripts/full_size.py FOLDER [--output FILE.json]
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from dllm_engine import LLM, DiffusionParams
from dllm_engine.checkpoints import load_config
from dllm_engine.evaluation.machine import peak, provenance, resident, restart_peak
from dllm_engine.memory.weights import weight_bytes
from dllm_engine.model_executor.model_runner import DiffusionModelRunner

READ_BYTES = 1 << 24
ALLOWED_SHARE, ALLOWED_BYTES, ALLOWED_TIME = 1.1, 1_500_000_000, 1.3
"""Peak and rest are to stay within 1.1 × the weights + 1.5 GB, loading within 1.3 × reading alone."""


def files_of(folder: Path, *, cached: bool) -> Iterator[Path]:
    """The checkpoint's files, out of the system's cache unless they may be there."""
    os.sync()
    for path in sorted(folder.glob("*.safetensors")):
        if not cached:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield path


def seconds_to_read(paths: list[Path]) -> float:
    buffer, start = bytearray(READ_BYTES), time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def load(options: argparse.Namespace) -> None:
    cached, gb = options.cache == "kept", 1e9
    seconds: dict[str, float] = {}
    load_model = DiffusionModelRunner.load_model

    def timed(runner: DiffusionModelRunner, **arguments: bool) -> None:
        list(files_of(options.folder, cached=cached))
        seconds["before"] = restart_peak()
        start, processor = time.perf_counter(), time.process_time()
        load_model(runner, **arguments)
        seconds["load"], seconds["processor"] = time.perf_counter() - start, time.process_time() - processor

    reads = [seconds_to_read(list(files_of(options.folder, cached=cached)))]
    with mock.patch.object(DiffusionModelRunner, "load_model", timed):
        llm = LLM(
            str(options.folder),
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_seqs=4,
            cache_method="dual",
            kv_cache_memory_bytes=1 << 30,
            use_tqdm_on_load=True,
        )
    most, rest = peak(), resident()
    config = load_config(str(options.folder))
    params = DiffusionParams(gen_length=32, block_length=32, steps=options.steps, ignore_eos=True)
    start = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": list(range(100, 164))}], params, use_tqdm=False)
    answered = time.perf_counter() - start
    assert len(output.outputs[0].token_ids) == 32
    after = peak(), resident()
    reads.append(seconds_to_read(list(files_of(options.folder, cached=cached))))
    weights = weight_bytes(config, 1, 2)
    allowed = ALLOWED_SHARE * weights + ALLOWED_BYTES
    read = sum(reads) / len(reads)
    sizes = (("peak of loading", most), ("at rest", rest), ("after an answer", after[1]))
    figures = {
        "machine": provenance(),
        "memory_gb": {name: size / gb for name, size in sizes},
        "allowed_gb": allowed / gb,
        "weights_gb": weights / gb,
        "before_gb": seconds["before"] / gb,
        "peak_of_answer_gb": after[0] / gb,
        "read_seconds": reads,
        "load_seconds": seconds["load"],
        "load_processor_seconds": seconds["processor"],
        "load_over_read": seconds["load"] / read,
        "allowed_time": ALLOWED_TIME,
        "answer_seconds": answered,
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkpoint, such as make_checkpoint.py writes")
    parser.add_argument("--cache", choices=("dropped", "kept"), default="dropped", help="of the system, of files")
    parser.add_argument("--steps", type=int, default=4, help="denoising steps of the answer")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    load(parser.parse_args())


if __name__ == "__main__":
    main()
