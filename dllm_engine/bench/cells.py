"""One cell of a benchmark: a cache method (or the plain baseline), a way of unmasking, a batch and a prompt length.

A cell is measured several times; ``cell_figures`` says what its samples amount to. The clock of a sample stands still
while the instrument looks, so records cost no measured time.
"""

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dllm_engine.bench.floor import Floor, PassShape
from dllm_engine.bench.machine import now, synchronize
from dllm_engine.bench.memory import MemoryMeter, peak, restart_peak
from dllm_engine.bench.passes import observed_step, runner_of
from dllm_engine.bench.plain import PlainDecoder, PlainResponse, decode
from dllm_engine.bench.subject import Unmasking
from dllm_engine.evaluation.answering import Memory, visible_tokens
from dllm_engine.figures import DiffusionFigures
from dllm_engine.scheduler.request import DecodingSpec

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams

PLAIN = "plain"
"""The baseline, where a cache method is named."""
NGRAM = 4
FLOOR_REPEATS = 3


@dataclass(frozen=True)
class Cell:
    """Which engine answers what."""

    method: str
    unmasking: Unmasking
    batch: int
    """Requests at once; the baseline answers them one after the other."""
    prompt: int
    """Tokens."""


class RequestSample(NamedTuple):
    """One request's response and times."""

    visible: tuple[int, ...]
    """Tokens before the first end token."""
    block_times: Sequence[float]
    """When each block was finished, in seconds since the request was handed in."""
    cost: DiffusionFigures | PlainResponse


@dataclass
class Sample:
    """One run of a cell."""

    seconds: float
    """Until all requests were answered."""
    requests: list[RequestSample]
    memory: Memory
    steps: dict[str, list[tuple[PassShape, float]]] = field(default_factory=lambda: defaultdict(list))
    """Shape and seconds of each forward pass that was timed, by kind."""
    floors: dict[str, tuple[PassShape, float]] = field(default_factory=dict)
    """A typical shape of each kind, and its floor in seconds."""


def repetition_rate(tokens: Sequence[int]) -> float | None:
    """Share of a response's 4-grams that have occurred in it before: 1 − distinct 4-grams / 4-grams.

    0: nothing is said twice; near 1: a loop. None for a response of fewer than four tokens.
    """
    ngrams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else None


def run_engine(
    llm: "LLM", prompts: Sequence[list[int]], params: "DiffusionParams", end_tokens: frozenset[int]
) -> Sample:
    """Hand in all requests at once and run the engine until they are answered. What earlier ones left in pages is
    forgotten, so that each round does the same work."""
    from vllm.sampling_params import RequestOutputKind

    params = params.clone()
    params.output_kind = RequestOutputKind.CUMULATIVE  # an output per block
    engine = llm.llm_engine
    llm.reset_prefix_cache()
    blocks: dict[str, list[float]] = {str(i): [] for i in range(len(prompts))}
    outputs: dict[str, Any] = {}
    meter = MemoryMeter(llm)
    steps: dict[str, list[tuple[PassShape, float]]] = defaultdict(list)
    start = now()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    seconds = now() - start
    while engine.has_unfinished_requests():
        dispatch = observed_step(llm)
        seconds += dispatch.seconds
        for output in dispatch.outputs:
            blocks[output.request_id].append(seconds)
            outputs[output.request_id] = output.outputs[0]
        for forward, of_pass in dispatch.timed_passes:
            if forward.kind is not None:
                steps[forward.kind].append((forward.shape, of_pass))
        meter.look()
    memory = meter.read()
    requests = [
        RequestSample(visible_tokens(outputs[i].token_ids, end_tokens), times, outputs[i].diffusion)
        for i, times in blocks.items()
    ]
    return Sample(seconds, requests, memory, steps)


def measure_floors(llm: "LLM", sample: Sample) -> None:
    """Add the floors of a sample's typical shapes: per kind the most common rows and keys, the median head. Updates of
    less than the canvas are left out."""
    for kind, steps in sample.steps.items():
        if kind == "update":
            continue
        ((requests, _),) = Counter(shape.requests for shape, _ in steps).most_common(1)
        head_rows = int(statistics.median(shape.head_rows for shape, _ in steps if shape.requests == requests))
        shape = PassShape(requests, head_rows)
        sample.floors[kind] = shape, Floor(runner_of(llm).model, shape).median_seconds(FLOOR_REPEATS)


def run_plain(
    model: PlainDecoder,
    prompts: Sequence[list[int]],
    spec: DecodingSpec,
    end_tokens: frozenset[int],
    *,
    keeps_blocks: bool = False,
) -> Sample:
    """One request after the other."""
    before, seconds = restart_peak(), 0.0
    requests = []
    for prompt in prompts:
        synchronize()
        start = now()
        times, response = [], None
        for response in decode(model, prompt, spec, end_tokens, keeps_blocks=keeps_blocks):  # noqa: B007 - the last one counts
            synchronize()
            times.append(now() - start)
        assert response is not None
        seconds += times[-1]
        requests.append(RequestSample(visible_tokens(response.token_ids, end_tokens), times, response))
    most = peak()
    return Sample(seconds, requests, Memory(model.num_bytes, 0, max(0, most - before), most))


@dataclass(frozen=True)
class Distribution:
    """Of ``of`` values, linear between ranks; with few values the high percentiles are near the maximum."""

    median: float
    p90: float
    p99: float
    of: int

    @classmethod
    def of_values(cls, values: Sequence[float]) -> "Distribution":
        median, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(median, p90, p99, len(values))


def step_figures(samples: Sequence[Sample], kind: str) -> dict[str, float] | None:
    """Of the steps of one kind and batch shape that were timed: medians over the samples, of times and of a sample's
    median step over its floor. ``keys``: that a row attends to; of the last request, where they differ."""
    timed: list[float] = []
    ratios, floors = [], []
    shape = None
    for sample in samples:
        if kind not in sample.floors:
            continue
        shape, floor = sample.floors[kind]
        seconds = [s for made, s in sample.steps[kind] if made.requests == shape.requests]
        timed += seconds
        floors.append(floor)
        ratios.append(statistics.median(seconds) / floor)
    if shape is None:
        return None
    return {
        "steps": len(timed),
        "median_seconds": statistics.median(timed),
        "floor_seconds": statistics.median(floors),
        "time_over_floor": statistics.median(ratios),
        "rows": shape.num_rows,
        "keys": shape.requests[-1][1],
        "head_rows": shape.head_rows,
    }


def cell_figures(cell: Cell, group: int, samples: Sequence[Sample], *, has_random_weights: bool) -> dict[str, Any]:
    """What a cell's samples amount to, as ``report.HOW`` says. Cells of one ``group`` were measured in turns. Passes,
    rows and visible tokens are means per request; ``process_bytes`` is the whole process, with every engine in it."""
    requests = [request for sample in samples for request in sample.requests]
    costs, memories = [r.cost for r in requests], [sample.memory for sample in samples]
    rates = [sum(len(r.visible) for r in sample.requests) / sample.seconds for sample in samples]
    visible = sum(len(r.visible) for r in requests)
    rows, passes = sum(cost.tokens_computed for cost in costs), sum(cost.forward_passes for cost in costs)
    repetitions = [rate for r in requests if (rate := repetition_rate(r.visible)) is not None]
    gaps = [b - a for r in requests for a, b in itertools.pairwise(r.block_times)]
    return {
        "method": cell.method,
        "unmasking": cell.unmasking.text,
        "batch": cell.batch,
        "prompt": cell.prompt,
        "group": group,
        "samples": len(samples),
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_lowest": min(rates),
        "tokens_per_second_highest": max(rates),
        "visible_tokens": visible / len(requests),
        "first_block": asdict(Distribution.of_values([r.block_times[0] for r in requests])),
        "latency": asdict(Distribution.of_values([r.block_times[-1] for r in requests])),
        "block_gap": asdict(Distribution.of_values(gaps)) if gaps else None,
        "forward_passes": passes / len(requests),
        "tokens_per_forward": sum(cost.tokens_unmasked for cost in costs) / passes,
        "rows_computed": rows / len(requests),
        "rows_per_token": rows / max(visible, 1),
        "weight_bytes": memories[0].weight_bytes,
        "page_bytes": max(memory.page_bytes for memory in memories),
        "working_bytes": int(statistics.median(memory.working_bytes for memory in memories)),
        "process_bytes": max(memory.process_bytes for memory in memories),
        "repetition": None if has_random_weights or not repetitions else statistics.mean(repetitions),
        "whole": step_figures(samples, "whole"),
        "reuse": step_figures(samples, "reuse"),
    }
