"""Comparisons of a device with a CPU: kernels in each type, and the demo models'
answers with every cache method.
"""

import gc
import json
import random
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm_engine.cache_methods import CACHE_METHODS, methods_for
from dllm_engine.check.cases import Case, Draw, Sizes
from dllm_engine.demo import DEMO_BLOCKS, DEMO_MODEL
from dllm_engine.params import DiffusionParams
from dllm_engine.text import format_table, one_line

OK, FAILED = "ok", "FAILED"
BOUNDS = {
    torch.int64: 0.0,
    torch.float64: 1e-12,
    torch.float32: 5e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
"""Largest error that rounding can explain, by the type of the result."""
ANSWERS = Path(__file__).parent / "answers.json"
"""The answers of each cache method on a CPU. ``python -m tests.cli.test_check`` writes
them anew.
"""
SETTINGS = json.loads((Path(__file__).parent / "settings.json").read_text())
"""Engine options by method, with cache options that refresh and evict even short
prompts.
"""
Run = Callable[[], tuple[float, float]]
Check = tuple[str, str, Run]
"""Name of a comparison, its type and sizes, and a function that returns the error and
its bound.
"""


def kernel_checks(
    device: str, sizes: Sizes, cases: Mapping[str, Case]
) -> Iterator[Check]:
    """Checks of every case in each type. The CPU computes from the same numbers, in
    float64 if it can, else in float32.
    """
    heads = f"{sizes.num_heads} heads of {sizes.head_dim} share {sizes.num_kv_heads}"

    def compare_devices(
        case: Case, dtype: torch.dtype, wide: torch.dtype
    ) -> tuple[float, float]:
        return compare(
            case(Draw(sizes, dtype, dtype, device)),
            case(Draw(sizes, dtype, wide, "cpu")),
        )

    for name, case in cases.items():
        wide = torch.float64 if name.startswith("paged_attention") else torch.float32
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            run = partial(compare_devices, case, dtype, wide)
            yield name, f"{str(dtype).removeprefix('torch.')}, {heads}", run


def compare(
    actual: Sequence[Tensor], expected: Sequence[Tensor]
) -> tuple[float, float]:
    """Error and bound of the result that is closest to its bound or exceeds it most.
    The error is the largest difference, relative to the largest expected number.
    Infinities and NaN must be in the same places."""
    errors = []
    for result, right in zip(actual, expected, strict=True):
        if result.shape != right.shape:
            raise ValueError(
                f"the shape is {list(result.shape)}, not {list(right.shape)}"
            )
        a, e = result.cpu().double(), right.double()
        differences = (
            (a - e).abs().masked_fill_((a == e) | (a.isnan() & e.isnan()), 0.0)
        )
        largest = e.where(e.isfinite(), 0.0).abs().amax().clamp(min=1e-30)
        errors.append(
            (
                float(differences.nan_to_num(torch.inf, torch.inf).amax() / largest),
                BOUNDS[result.dtype],
            )
        )
    return max(errors, key=lambda each: each[0] / (each[1] or 1e-30))


def answer_checks(device: str) -> Iterator[Check]:
    """Checks of answers with each cache method of this package; on GPUs also with
    recorded steps, and on two GPUs.
    """
    on_gpu = device == "cuda"
    for method in CACHE_METHODS.own:
        yield "answers", method, partial(_compare_answers, method, cuda_graphs=False)
    for method in CACHE_METHODS.own if on_gpu else ():
        yield (
            "answers, recorded steps",
            method,
            partial(_compare_answers, method, cuda_graphs=True),
        )
    if on_gpu and torch.cuda.device_count() > 1:
        method = SETTINGS["two_ranks"]
        yield (
            "answers, two ranks",
            method,
            partial(_compare_answers, method, tensor_parallel_size=2),
        )


def _compare_answers(method: str, **settings: Any) -> tuple[float, float]:
    """Number of answers that differ, and its bound 0."""
    answers = answers_of(method, **settings)
    stored = json.loads(ANSWERS.read_text())[method]
    return sum(
        answer != right for answer, right in zip(answers, stored, strict=True)
    ), 0


def answers_of(method: str, **settings: Any) -> list[list[Any]]:
    """Tokens of two responses in one batch, one of them sampled, and the positions that
    each step unmasked. Prompts are random tokens, because the model answers trained
    prompts right even with a wrong cache."""
    from dllm_engine.llm import LLM

    model = DEMO_MODEL if method in methods_for("full") else DEMO_BLOCKS
    options = {
        "cache_method": method,
        "cache_options": SETTINGS["cache_options"].get(method),
    }
    llm = LLM(model, **SETTINGS["engine"], **options, **settings)
    try:
        if settings.get("cuda_graphs") and not all(llm.collective_rpc("records_steps")):
            raise ValueError("steps could not be recorded; the engine's log says why")
        same: dict[str, Any] = {"gen_length": 24, "block_length": 8, "ignore_eos": True}
        params = [
            DiffusionParams(**same),
            DiffusionParams(temperature=0.7, seed=1, **same),
        ]
        prompts = []
        for length, seed in ((50, 2), (20, 0)):
            draw = random.Random(seed)
            # Prompts have no special tokens.
            prompts.append(
                {"prompt_token_ids": [draw.randrange(4, 512) for _ in range(length)]}
            )
        completions = [
            output.outputs[0]
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        return [
            [list(completion.token_ids), completion.diffusion.unmasked_per_step]
            for completion in completions
        ]
    finally:
        llm.llm_engine.engine_core.shutdown()  # memory for the next
        del llm
        gc.collect()
        # vLLM measures free device memory. Without a GPU this does nothing.
        torch.cuda.empty_cache()


def outcome_of(name: str, case: str, run: Run) -> dict[str, Any]:
    """Result, error, bound and seconds of a check, or the reason and traceback of its
    exception.
    """
    start, error, bound, reason, trace = time.perf_counter(), torch.inf, 0.0, "", ""
    try:
        error, bound = run()
    except Exception as raised:
        reason = f"{type(raised).__name__}: {one_line(raised)}"
        trace = "".join(traceback.format_exception(raised))
    outcome = {
        "name": name,
        "case": case,
        "result": OK if error <= bound else FAILED,
        "error": error,
    }
    return outcome | {
        "bound": bound,
        "seconds": time.perf_counter() - start,
        "reason": reason,
        "traceback": trace,
    }


def as_table(outcomes: Iterable[dict[str, Any]]) -> str:
    """Table with one line for neighbouring checks of the same name and result, with the
    case that is closest to its bound or exceeds it most.
    """
    rows = [("CHECK", "CASE", "ERROR", "BOUND", "TIME", "RESULT")]
    for (name, result), group in groupby(
        outcomes, key=lambda o: (o["name"], o["result"])
    ):
        members = list(group)
        worst = max(members, key=lambda o: o["error"] / (o["bound"] or 1.0))
        case = (
            worst["case"]
            if len(members) == 1
            else f"{len(members)} cases, {worst['case']}"
        )
        figures = (
            f"{worst['error']:.1e}",
            f"{worst['bound']:.1e}",
            f"{sum(o['seconds'] for o in members):.2f} s",
        )
        rows.append(
            (name, case, *figures, ": ".join(filter(None, (result, worst["reason"]))))
        )
    return format_table(rows)
