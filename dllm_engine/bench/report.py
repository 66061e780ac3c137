"""Results as tables: one run, or two side by side. Works on what a result file holds; needs neither torch nor vLLM."""

from collections.abc import Callable, Iterator
from typing import Any

from dllm_engine.text import format_table

SCHEMA = 2
"""Of result files; raised where a reader of older ones would go wrong."""
MIB = 1 << 20
NOTHING = "–"
HOW = {
    "tokens_per_second": "visible tokens (those before the first end token; prompt tokens never) of all requests of a "
    "batch, over the seconds until all were answered; median over the samples",
    "over_plain": "tokens_per_second over the plain baseline's, same prompt length and unmasking, measured in turns "
    "with it: the same model in plain PyTorch, one request after the other, whole canvas in every step (block "
    "diffusion: what the block attends to, or the block alone where the authors keep finished blocks)",
    "first_block": "seconds from handing all requests in to a request's first finished block; over requests, samples",
    "latency": "seconds from handing all requests in to a request's end; the baseline's from its own start",
    "block_gap": "seconds between two neighbouring blocks of a request",
    "forward_passes": "of a request",
    "tokens_per_forward": "tokens unmasked per forward pass of a request",
    "rows_per_token": "rows fed to the model (mean over the layers, where they differ; none of a guide's) per visible "
    "token",
    "weight_bytes, page_bytes, working_bytes": "weights; most pages held at once; most memory beyond what was held "
    "when the requests came (resident set on a CPU, PyTorch's allocations on a GPU)",
    "whole, reuse": "steps in which every request computes its whole canvas, or only reuses its cache: median time, "
    "and the time of their linear layers, attention and head on masked rows alone, with the same weights and threads "
    "(the floor); time_over_floor is 1 at best; a guide's pass is in the time, not in the floor",
    "repetition": "share of a response's 4-grams of visible tokens that occurred in it before; mean over responses",
    "rates": "a large copy (bytes read and written) and a large square matrix product in the model's type",
}
"""How each figure of a result file was made; written into it."""
LEGEND = """\
TOKENS/S       visible response tokens per second, of the whole batch (before the end token; never the prompt): median,
               and the lowest and highest round
× PLAIN        that over plain PyTorch's: the authors' way to decode, no engine, one request after the other (row
               `plain`)
1ST BLOCK      time to the first finished block, median over requests
LATENCY        time to the end of a request: median, and what 90 of 100 stay below
PASSES         forward passes per request
TOK/PASS       tokens unmasked per forward pass
ROWS/TOK       positions computed per visible token; what a cache saves
MEMORY         weights + pages + working memory at the peak, MiB
PAGES          of it pages of the cache, MiB
FULL÷, REUSE÷  time of a step over its floor, which is its matrix products alone (1 is best): steps over the whole
               canvas, and steps that reuse the cache; a guide's pass is in the time, not in the floor
REPEAT         share of repeated 4-grams in the responses (– for random weights)"""
Report = dict[str, Any]
CellKey = tuple[str, str, str, int, int]
"""Model, method, unmasking, batch, prompt."""


def tables(report: Report) -> str:
    """A table per model, with the machine above and a line per column below."""
    parts = [machine_line(report)]
    for run in report["runs"]:
        rows = [COLUMNS, *(_row(run, cell) for cell in run["cells"])]
        parts += [run_line(run), format_table(rows)]
    return "\n\n".join([*parts, LEGEND])


def machine_line(report: Report) -> str:
    m = report["machine"]
    versions = f"torch {m['torch']}, vLLM {m['vllm']}"
    return f"{m['processor']}, {m['threads']} threads, {versions}, {m['clock']} clock, {m['date']}"


def run_line(run: dict[str, Any]) -> str:
    shape, rates = run["shape"], run["rates"]
    return (
        f"{run['model']} ({run['weights']} weights, d={shape['hidden_size']}, {shape['num_layers']} layers, "
        f"{run['dtype']}): response {run['response']}, blocks of {run['block_length']}, medians of {run['repeats']} "
        f"rounds; this machine multiplies {rates['product_flops_per_second'] / 1e9:.0f} GFLOP/s, copies "
        f"{rates['copy_bytes_per_second'] / 1e9:.1f} GB/s"
    )


def seconds_text(seconds: float) -> str:
    """In milliseconds below a second."""
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _time_over_floor(kind: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda cell: cell[kind] and cell[kind]["time_over_floor"]


FIGURES: dict[str, tuple[Callable[[dict[str, Any]], float | None], Callable[[float], str]]] = {
    "TOKENS/S": (lambda cell: cell["tokens_per_second"], "{:.1f}".format),
    "1ST BLOCK": (lambda cell: cell["first_block"]["median"], seconds_text),
    "LATENCY": (lambda cell: cell["latency"]["median"], seconds_text),
    "PASSES": (lambda cell: cell["forward_passes"], "{:.0f}".format),
    "TOK/PASS": (lambda cell: cell["tokens_per_forward"], "{:.2f}".format),
    "ROWS/TOK": (lambda cell: cell["rows_per_token"], "{:.0f}".format),
    "MEMORY": (lambda c: (c["weight_bytes"] + c["page_bytes"] + c["working_bytes"]) / MIB, "{:.1f}".format),
    "PAGES": (lambda cell: cell["page_bytes"] / MIB, "{:.1f}".format),
    "FULL÷": (_time_over_floor("whole"), "{:.2f}".format),
    "REUSE÷": (_time_over_floor("reuse"), "{:.2f}".format),
    "REPEAT": (lambda cell: cell["repetition"], "{:.0%}".format),
}
"""Columns: a cell's value, and how it is written."""
_FIRST, *_OTHERS = FIGURES
COLUMNS = ("METHOD", "UNMASKING", "BATCH", "PROMPT", _FIRST, "× PLAIN", *_OTHERS)


def _row(run: dict[str, Any], cell: dict[str, Any]) -> list[str]:
    names = {"METHOD": cell["method"], "UNMASKING": cell["unmasking"], "BATCH": cell["batch"], "PROMPT": cell["prompt"]}
    values = {name: (value(cell), form) for name, (value, form) in FIGURES.items()}
    values["× PLAIN"] = over_plain(run, cell), "{:.2f}".format
    texts = {name: NOTHING if value is None else form(value) for name, (value, form) in values.items()}
    texts["TOKENS/S"] += f" ({cell['tokens_per_second_lowest']:.0f}–{cell['tokens_per_second_highest']:.0f})"
    texts["LATENCY"] += f", {seconds_text(cell['latency']['p90'])}"
    return [str((names | texts)[column]) for column in COLUMNS]


def over_plain(run: dict[str, Any], cell: dict[str, Any]) -> float | None:
    """A cell's tokens per second over those of the baseline in its group; None where there is none, or for itself."""
    same = ("group", "unmasking", "prompt")
    if cell["method"] == "plain":
        return None
    for other in run["cells"]:
        if other["method"] == "plain" and all(other[key] == cell[key] for key in same):
            base: float = other["tokens_per_second"]
            return cell["tokens_per_second"] / base if base else None
    return None


# Two result files

_RUN_SETTINGS = ("weights", "shape", "dtype", "engine_args", "response", "block_length", "seed")


def comparison(first: Report, second: Report, names: tuple[str, str]) -> str:
    """Ratios second / first of the cells that both have, and in what else the two differ."""
    before, after = (dict(_cells(report)) for report in (first, second))
    rows: list[tuple[str, ...]] = [("MODEL", "METHOD", "UNMASKING", "BATCH", "PROMPT", *FIGURES)]
    for key in before:
        if key in after:
            pairs = ((value(before[key]), value(after[key])) for value, _ in FIGURES.values())
            rows.append((*map(str, key), *(f"{b / a:.2f}" if a and b is not None else NOTHING for a, b in pairs)))
    lines = [f"{names[1]} over {names[0]}, figure by figure; 1 is no change."]
    lines += [f"Note: {note}" for note in _differences(first, second)]
    for name, mine, others in ((names[0], before, after), (names[1], after, before)):
        alone = [key for key in mine if key not in others]
        if alone:
            lines.append(f"Note: only in {name}: {'; '.join(' '.join(map(str, key)) for key in alone)}.")
    if len(rows) == 1:
        return "\n".join([*lines, "", "The two have no cell in common."])
    return "\n".join([*lines, "", format_table(rows)])


def _cells(report: Report) -> Iterator[tuple[CellKey, dict[str, Any]]]:
    for run in report["runs"]:
        for cell in run["cells"]:
            if cell["method"] == "plain" and cell["group"]:
                continue  # one baseline stands for those of all groups
            yield (run["model"], cell["method"], cell["unmasking"], cell["batch"], cell["prompt"]), cell


def _differences(first: Report, second: Report) -> Iterator[str]:
    for key in ("processor", "threads", "torch", "vllm", "clock"):
        if first["machine"][key] != second["machine"][key]:
            yield f"{key} was {first['machine'][key]}, then {second['machine'][key]}: times do not compare."
    runs = {run["model"]: run for run in second["runs"]}
    for run in first["runs"]:
        other = runs.get(run["model"], run)
        for key in _RUN_SETTINGS:
            if run[key] != other[key]:
                yield f"{run['model']}: {key} was {run[key]}, then {other[key]}."
        for method, options in run["cache_options"].items():
            if options != (others := other["cache_options"].get(method, options)):
                yield f"{run['model']}: cache_options of {method} were {options}, then {others}."
