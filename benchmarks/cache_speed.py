"""Speed of whole responses by cache method: over the first method, and over the floors of their steps.

Each method decodes the same requests with the same number of tokens per step; the methods take turns. The floor of a
response is the sum over its forward passes of the time of their linear layers, attention and head alone at their shapes
(``dllm_engine/bench/floor.py``), measured in the same run.

    python benchmarks/cache_speed.py [--canvas 1024 --gen-length 64] [--methods none dual sparse] [--output FILE.json]
    python benchmarks/cache_speed.py --canvas 512 2048 8192 --hidden-size 256 --layers 4 --none-steps 4
    python benchmarks/cache_speed.py --methods dual dual:refresh=response --tokens-per-pass 1 4 --gen-length 256
    python benchmarks/cache_speed.py --methods sparse --requests 32 --loop --layers 2 --canvas 256 --gen-length 32

`--loop` compares `sparse` with the same method in plain PyTorch, one request after the other. Steps of `none` are all
alike: `--none-steps` runs only the first ones and counts them for all. A method may have options behind a colon: its
own, or ``suffix_blocks``.
"""

import argparse
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from program import (
    Rows,
    add_model_arguments,
    argument_parser,
    finish_requests,
    llada_config,
    parse,
    report,
    start_engine,
)

from dllm_engine import LLM, DiffusionParams
from dllm_engine.bench.floor import Floor, PassShape
from dllm_engine.bench.machine import seconds_of
from dllm_engine.bench.passes import ObservedPass, observed_step, runner_of
from dllm_engine.bench.plain import KeysValues, PlainCanvas, PlainDecoder
from dllm_engine.cli.arguments import key_value
from dllm_engine.families import family_of
from dllm_engine.model_executor.models.configs import parse_config
from dllm_engine.scheduler.methods.sparse import SparseOptions
from dllm_engine.scheduler.options.resolve import resolve_decoding
from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import Blocks, DecodingSpec
from dllm_engine.scheduler.step_plan import unmask_quota

FLOOR_REPEATS = 3


@dataclass
class Subject:
    """A cache method with options, as ``--methods`` names it."""

    name: str
    llm: LLM
    decoding: dict[str, Any]

    @classmethod
    def start(cls, name: str, options: argparse.Namespace) -> "Subject":
        method, _, listed = name.partition(":")
        given = dict(map(key_value, filter(None, listed.split(","))))
        decoding = {key: given.pop(key) for key in ("suffix_blocks",) if key in given}
        settings = {"cache_method": method, "cache_options": given}
        return cls(name, start_engine(options, max(options.canvas), options.requests, **settings), decoding)


class Decoded(NamedTuple):
    """What a subject did for its requests."""

    seconds: float
    refresh_seconds: float
    """Of passes in which a request did not reuse."""
    passes: list[ObservedPass]


def params_of(options: argparse.Namespace, tokens_per_pass: int = 1, **decoding: Any) -> DiffusionParams:
    steps = options.gen_length // tokens_per_pass
    return DiffusionParams(
        gen_length=options.gen_length, block_length=options.block_length, steps=steps, ignore_eos=True, **decoding
    )


def decode(llm: LLM, canvas: int, params: DiffusionParams, options: argparse.Namespace, max_passes: float) -> Decoded:
    """All requests at once, or their first ``max_passes`` forward passes."""
    request_ids = [str(i) for i in range(options.requests)]
    for i, request_id in enumerate(request_ids):
        prompt = [5 + (i + j) % 1000 for j in range(canvas - options.gen_length)]
        llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
    seconds, refresh_seconds = 0.0, 0.0
    passes: list[ObservedPass] = []
    while llm.llm_engine.has_unfinished_requests() and len(passes) < max_passes:
        dispatch = observed_step(llm)
        seconds += dispatch.seconds
        refresh_seconds += sum(of_pass for forward, of_pass in dispatch.timed_passes if forward.kind != "reuse")
        passes += dispatch.passes
    finish_requests(llm, request_ids)
    return Decoded(seconds, refresh_seconds, passes)


def floor_seconds(llm: LLM, passes: list[ObservedPass]) -> float:
    """Sum of the floors; passes of equal rows and keys count with the mean of their head's rows."""
    head_rows: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for forward in passes:
        head_rows[forward.shape.requests].append(forward.shape.head_rows)
    total = 0.0
    for requests, rows in head_rows.items():
        floor = Floor(runner_of(llm).model, PassShape(requests, round(statistics.mean(rows))))
        total += len(rows) * floor.median_seconds(FLOOR_REPEATS)
    return total


@torch.inference_mode()
def decode_sparse(model: PlainDecoder, prompt: list[int], spec: DecodingSpec) -> None:
    """Sparse-dLLM, Algorithm 4, for one request with one token per step."""
    cache = spec.cache
    assert isinstance(cache, SparseOptions)
    canvas = PlainCanvas(model, prompt, spec)
    everywhere = torch.arange(spec.canvas_length)
    num_forwards = 0
    for block in range(spec.num_blocks):
        span, step = slice(*spec.block_span(block)), 0
        outside = torch.cat((everywhere[: span.start], everywhere[span.stop :]))
        kept: list[KeysValues] = []
        while left := canvas.masked(spec.block_span(block)).numel():
            reuses = step > cache.update_delay
            rows = everywhere[span] if reuses else everywhere
            x, phases = model.embed(canvas.tokens[rows]), model.phases(rows)
            for number in range(model.shape.num_layers):
                x, q, (k, v) = model.layer(number, x, phases, kept[number] if reuses else None)
                if step == cache.update_delay:
                    mean = q[:, span].mean(dim=1).unflatten(0, (k.shape[0], -1)).sum(dim=1)
                    scores = torch.einsum("gd,gtd->t", mean, k[:, outside])
                    pooled = F.max_pool1d(scores[None], cache.pool_kernel_size, 1, cache.pool_kernel_size // 2)[0]
                    retained = int(len(outside) * cache.retention_ratio)
                    chosen = outside[pooled.topk(retained).indices.sort().values]
                    kept.append((k[:, chosen], v[:, chosen]))
            quota = unmask_quota(spec, Progress(Blocks(block, block + 1), step, [left]), window_alone=reuses)
            canvas.fill(x, int(rows[0]), quota)
            num_forwards += 1
            step += 1


def plain_loop(llm: LLM, canvas: int, options: argparse.Namespace) -> float:
    """Seconds of the same requests in plain PyTorch; the weights' values do not change them."""
    config = parse_config(llada_config(options, canvas), "llada")
    model = PlainDecoder.random(config, getattr(torch, options.dtype))
    prompt = [5 + i % 1000 for i in range(canvas - options.gen_length)]
    spec = resolve_decoding(params_of(options), len(prompt), family_of(config), runner_of(llm).options)
    decode_sparse(model, prompt, spec)  # warms up
    return sum(seconds_of(lambda: decode_sparse(model, prompt, spec)) for _ in range(options.requests))


def measured(subjects: list[Subject], canvas: int, tokens_per_pass: int, options: argparse.Namespace) -> Rows:
    """A row per subject; they take turns."""
    runs: dict[str, list[Decoded]] = defaultdict(list)
    floors: dict[str, list[float]] = defaultdict(list)
    loops: list[float] = []
    for number in range(options.rounds + 1):
        for subject in subjects:
            some = options.none_steps if subject.name == "none" else None
            params = params_of(options, tokens_per_pass, **subject.decoding)
            run = decode(subject.llm, canvas, params, options, some or float("inf"))
            if number == 0:  # warms up
                continue
            share = len(run.passes) * tokens_per_pass / options.gen_length if some else 1
            runs[subject.name].append(Decoded(run.seconds / share, run.refresh_seconds / share, run.passes))
            floors[subject.name].append(floor_seconds(subject.llm, run.passes) / share)
            if subject.name == "sparse" and options.loop:
                loops.append(plain_loop(subject.llm, canvas, options))
    rows: Rows = []
    for name, of_subject in runs.items():
        seconds = statistics.median(run.seconds for run in of_subject)
        row = {
            "canvas": canvas,
            "tokens_per_pass": tokens_per_pass,
            "method": name,
            "rows": sum(forward.shape.num_rows for forward in of_subject[0].passes),
            "seconds": seconds,
            "lowest_seconds": min(run.seconds for run in of_subject),
            "highest_seconds": max(run.seconds for run in of_subject),
            "refresh_share": statistics.median(run.refresh_seconds / run.seconds for run in of_subject),
            "floor_over_engine": statistics.median(
                floor / run.seconds for floor, run in zip(floors[name], of_subject, strict=True)
            ),
        }
        rows.append(row)
        row[f"speed_over_{subjects[0].name}"] = rows[0]["seconds"] / seconds
        if loops and name == "sparse":
            row["loop_seconds"] = statistics.median(loops)
            row["loop_over_engine"] = statistics.median(
                loop / run.seconds for loop, run in zip(loops, of_subject, strict=True)
            )
    return rows


def main() -> None:
    parser = argument_parser(__doc__)
    add_model_arguments(parser, hidden_size=512, layers=8, heads=8, vocab_size=32_768)
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["none", "prefix", "dual", "sparse"],
        metavar="NAME[:OPTION=VALUE,…]",
        help="speeds are over the first",
    )
    parser.add_argument("--tokens-per-pass", type=int, nargs="+", default=[1])
    parser.add_argument("--canvas", type=int, nargs="+", default=[1024])
    parser.add_argument("--gen-length", type=int, default=64)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--requests", type=int, default=1, help="at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--none-steps", type=int, help="steps of `none` that are run (default: all)")
    parser.add_argument("--loop", action="store_true", help="also a plain loop of `sparse` over the requests")
    options = parse(parser)
    subjects = [Subject.start(name, options) for name in options.methods]
    figures = [
        row
        for canvas in options.canvas
        for tokens_per_pass in options.tokens_per_pass
        for row in measured(subjects, canvas, tokens_per_pass, options)
    ]
    report(options, figures=figures)


if __name__ == "__main__":
    main()
