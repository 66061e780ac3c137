"""What evicting prompt tokens costs in answers: MaskKV's retention on the demo model, by budget, scorer and place.

Most of a prompt is filler nobody asks about. A response is scored per asked item, so an answer can be partly right.

    python benchmarks/retention_quality.py [--count 180] [--profile FILE] [--output FILE.json] [--figures FOLDER]

Parts, all by default: `budgets` (share of the prompt retained × scorer, with and without filler), `layers` (layer
budgets × head budgets at 25%), `settings` (what else could matter, at 50%), `pooled` (votes pooled over neighbours),
`spared` (all layers or heads but one evict, at 50%), `foresight` (whether a head looks in the first pass where it looks
later), `depth` (a needle in a haystack: prompt length × place of the one asked item). All engines of a part are of one
process; greedy decoding, so that a run repeats exactly. `--profile` is a file of `dllm profile`; without one the layer
budgets that need it are uniform.
"""

import argparse
import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from dllm_engine import LLM, DiffusionParams
from dllm_engine.bench.machine import machine
from dllm_engine.cli.table import format_table
from dllm_engine.demo import DEMO_MODEL
from dllm_engine.demo.tasks import LIST_TASKS, RECALL_TASKS, Example, item_matches, make_examples
from dllm_engine.model_executor.passes import maskkv
from dllm_engine.scheduler.methods import maskkv as maskkv_plan

LENGTHS = {"gen_length": 32, "block_length": 8}
BUDGETS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
"""Shares of the prompt that a KV head retains on average; 1.0 evicts nothing, whatever the scorer."""
SCORERS = ("mask_voting", "mean_query", "snapkv", "random")
WIDTHS = (1, 3, 5, 7)
"""Windows that votes are pooled over; 1 is the paper's, 5 SnapKV's."""
LAYER_BUDGETS = ("uniform", "boundary", "pyramid", "squeeze")
HEAD_BUDGETS = ("uniform", "prompt_preference", "adaptive")
FILLER, PAIRS = 0.7, {"names": 12, "keys": 10, "facts": 10}
"""As much filler as the demo model was trained with, and the most pairs that then fit the lengths it was trained
with."""
SETTINGS: dict[str, dict[str, Any]] = {
    "as in the paper": {},
    "first layer recomputed in every step": {"refresh_first_layer": True},
    "response recomputed in every step": {"response_refresh_interval": 1},
    "prompt recomputed every 16 steps": {"prompt_refresh_interval": 16},
    "prompt and response recomputed in every step": {"prompt_refresh_interval": 1, "response_refresh_interval": 1},
    "layers alike": {"layer_budget": "uniform"},
    "heads alike": {"head_budget": "uniform"},
    "layers and heads alike": {"layer_budget": "uniform", "head_budget": "uniform"},
    "rounding and capped heads redistributed": {"redistribute": True},
}
NEEDLE_TOKENS = (64, 96, 128, 160, 192, 224)
NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEEDLE_PAIRS = 4
"""Items in a haystack: the needle, and others like it that nobody asks about, at places of their own."""
ALLOWED_LOSS, REQUIRED_LEAD = 0.05, 0.30
"""What is asked of mask voting: at 50% no more than this below no eviction, at 25% this above chance."""


@dataclass(frozen=True)
class Score:
    """Items right and items asked, per prompt."""

    right: tuple[int, ...]
    asked: tuple[int, ...]

    @property
    def rate(self) -> float:
        return sum(self.right) / sum(self.asked)

    @property
    def margin(self) -> float:
        """Half a 95% interval; items of one prompt are not independent, prompts are."""
        return self.margin_over(None)

    def margin_over(self, other: "Score | None") -> float:
        """Half a 95% interval of the rate, or of its difference from another score of the same prompts."""
        gained = self.right if other is None else [a - b for a, b in zip(self.right, other.right, strict=True)]
        mean = sum(gained) / sum(self.asked)
        squares = sum((g - mean * n) ** 2 for g, n in zip(gained, self.asked, strict=True))
        return 1.96 * math.sqrt(squares) / sum(self.asked)

    @classmethod
    def pooled(cls, scores: "Iterable[Score]") -> "Score":
        parts = list(scores)
        return cls(tuple(chain(*(p.right for p in parts))), tuple(chain(*(p.asked for p in parts))))


class DemoEngines:
    """MaskKV engines on the demo model by their options; each serves all budgets, as requests may lower theirs.

    All live until the process ends: shutting one down would take vLLM's process groups from the others.
    """

    def __init__(self, profile: Path | None) -> None:
        self.profile = {} if profile is None else {"profile": str(profile)}
        self._engines: dict[str, LLM] = {}

    def __call__(self, **options: Any) -> LLM:
        options = {"kv_budget": None, "retention_ratio": 1.0} | self.profile | options
        key = json.dumps(options, sort_keys=True)
        if key not in self._engines:
            self._engines[key] = LLM(
                model=DEMO_MODEL, cache_method="maskkv", cache_options=options, kv_cache_memory_bytes=256 << 20
            )
        return self._engines[key]


def ask(llm: LLM, examples: Sequence[Example], ratio: float) -> Score:
    """Answer the examples, retaining ``ratio`` of each prompt; request i draws its noise from seed i."""
    conversations = [[{"role": "user", "content": example.prompt}] for example in examples]
    params = [DiffusionParams(**LENGTHS, retention_ratio=ratio, seed=i) for i in range(len(examples))]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    right = tuple(item_matches(o.outputs[0].text, e) for o, e in zip(outputs, examples, strict=True))
    return Score(right, tuple(len(example.items) for example in examples))


def figures_of(scores: dict[str, Score]) -> dict[str, Any]:
    """Rates by task and over all items, with the margin of the latter, as JSON."""
    pooled = Score.pooled(scores.values())
    by_task = {task: round(score.rate, 4) for task, score in scores.items()}
    return {"items": round(pooled.rate, 4), "margin": round(pooled.margin, 4), "by_task": by_task}


def show(title: str, table: Sequence[Sequence[str]]) -> None:
    print(f"\n{title}\n{format_table(table)}", flush=True)


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}"


# Budgets × scorers


def measure_budgets(engines: DemoEngines, prompts: dict[str, list[Example]]) -> dict[tuple[str, float], dict]:
    """Scores by task, for each scorer and budget; ``("", 1.0)`` is no eviction."""
    scores = {("", 1.0): {task: ask(engines(), examples, 1.0) for task, examples in prompts.items()}}
    for scorer, ratio in product(SCORERS, BUDGETS):
        llm = engines(scorer=scorer)
        scores[scorer, ratio] = {task: ask(llm, examples, ratio) for task, examples in prompts.items()}
    return scores


def budget_part(engines: DemoEngines, count: int, seed: int) -> dict[str, Any]:
    kinds: dict[str, dict[str, list[Example]]] = {
        "with filler": {t: make_examples(t, count, seed, filler=FILLER, max_pairs=PAIRS[t]) for t in RECALL_TASKS},
        "without filler": {t: make_examples(t, count, seed, max_pairs=PAIRS[t]) for t in RECALL_TASKS},
        "lists, all of it asked": {t: make_examples(t, count, seed) for t in LIST_TASKS},
    }
    report: dict[str, Any] = {}
    for kind, prompts in kinds.items():
        scores = measure_budgets(engines, prompts)
        nothing_evicted = figures_of(scores["", 1.0])
        table = [("SCORER", *(f"{ratio:.0%}" for ratio in BUDGETS), "100%")]
        for scorer in SCORERS:
            rates = [Score.pooled(scores[scorer, ratio].values()).rate for ratio in BUDGETS]
            table.append((scorer, *map(percent, rates), percent(nothing_evicted["items"])))
        show(f"Items right (%), {kind}: {', '.join(prompts)}; by share of the prompt retained", table)
        by_task = [("mask_voting", *(f"{ratio:.0%}" for ratio in BUDGETS), "100%")]
        for task in prompts:
            rates = [scores["mask_voting", ratio][task].rate for ratio in BUDGETS]
            by_task.append((task, *map(percent, rates), percent(scores["", 1.0][task].rate)))
        print(format_table(by_task))
        cells = [figures_of(by_task) for by_task in scores.values()]
        print(f"margins up to ±{percent(max(cell['margin'] for cell in cells))} points (95%)", flush=True)
        report[kind] = {
            "no eviction": nothing_evicted,
            "cells": [{"scorer": s, "ratio": r} | figures_of(scores[s, r]) for s, r in scores if s],
        }
        if kind == "with filler":
            report["filler_share_of_tokens"] = filler_shares(engines(), prompts)
            report["required"] = verdicts(scores)
    return report


def verdicts(scores: dict[tuple[str, float], dict]) -> dict[str, Any]:
    """The two requirements, over all items and for each task alone."""
    found: dict[str, Any] = {}
    for task in ("all", *RECALL_TASKS):

        def of(scorer: str, ratio: float, task: str = task) -> Score:
            by_task = scores[scorer, ratio]
            return Score.pooled(by_task.values()) if task == "all" else by_task[task]

        whole, half = of("", 1.0), of("mask_voting", 0.5)
        quarter, chance = of("mask_voting", 0.25), of("random", 0.25)
        found[task] = {
            "loss_at_50": round(whole.rate - half.rate, 4),
            "loss_margin": round(half.margin_over(whole), 4),
            "loss_holds": whole.rate - half.rate <= ALLOWED_LOSS,
            "lead_over_random_at_25": round(quarter.rate - chance.rate, 4),
            "lead_margin": round(quarter.margin_over(chance), 4),
            "lead_holds": quarter.rate - chance.rate >= REQUIRED_LEAD,
        }
        row = found[task]
        print(
            f"{task}: at 50% {percent(row['loss_at_50'])} ± {percent(row['loss_margin'])} points below no eviction "
            f"(at most {percent(ALLOWED_LOSS)}: {'holds' if row['loss_holds'] else 'DOES NOT HOLD'}); at 25% "
            f"{percent(row['lead_over_random_at_25'])} ± {percent(row['lead_margin'])} above random (at least "
            f"{percent(REQUIRED_LEAD)}: {'holds' if row['lead_holds'] else 'DOES NOT HOLD'})"
        )
    return found


def filler_shares(llm: LLM, prompts: dict[str, list[Example]]) -> dict[str, float]:
    """Least and mean share of the prompts' tokens, template included, that is filler."""
    tokenizer = llm.get_tokenizer()
    shares = []
    for example in chain(*prompts.values()):
        sentences = re.findall(r"The \w+ \w+ is \w+\.", example.prompt)
        filler = sum(len(tokenizer.encode(f" {sentence}", add_special_tokens=False)) for sentence in sentences)
        shares.append(filler / num_tokens(llm, example.prompt))
    found = {"least": round(min(shares), 3), "mean": round(sum(shares) / len(shares), 3)}
    print(f"filler: {found['least']:.0%} of the tokens in the prompt with least, {found['mean']:.0%} on average")
    return found


def num_tokens(llm: LLM, prompt: str) -> int:
    """Of a prompt in the chat template."""
    messages = [{"role": "user", "content": prompt}]
    ids = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return len(ids)


# Layer budgets × head budgets, and other settings


def layer_part(engines: DemoEngines, count: int, seed: int, ratio: float = 0.25) -> dict[str, Any]:
    prompts = {t: make_examples(t, count, seed, filler=FILLER, max_pairs=PAIRS[t]) for t in RECALL_TASKS}
    table, cells = [("LAYERS", *HEAD_BUDGETS)], []
    for layers in LAYER_BUDGETS:
        row = [layers]
        for heads in HEAD_BUDGETS:
            llm = engines(layer_budget=layers, head_budget=heads)
            figures = figures_of({task: ask(llm, examples, ratio) for task, examples in prompts.items()})
            cells.append({"layer_budget": layers, "head_budget": heads} | figures)
            row.append(percent(figures["items"]))
        table.append(tuple(row))
    profile = "as measured by the given profile" if engines.profile else "no profile: boundary and squeeze know nothing"
    show(f"Items right (%) at {ratio:.0%}, layer budgets by head budgets; {profile}", table)
    print(f"margins up to ±{percent(max(cell['margin'] for cell in cells))} points (95%)")
    return {"ratio": ratio, "cells": cells}


def settings_part(engines: DemoEngines, count: int, seed: int, ratio: float = 0.5) -> dict[str, Any]:
    prompts = {t: make_examples(t, count, seed, filler=FILLER, max_pairs=PAIRS[t]) for t in RECALL_TASKS}
    table, cells = [("SETTINGS", "no eviction", f"{ratio:.0%}", *(f"{t} {ratio:.0%}" for t in RECALL_TASKS))], []
    for name, options in SETTINGS.items():
        llm = engines(**options)
        whole, part = (
            figures_of({task: ask(llm, examples, r) for task, examples in prompts.items()}) for r in (1.0, ratio)
        )
        cells.append({"settings": name, "cache_options": options, "no eviction": whole, "evicted": part})
        rates = (whole["items"], part["items"], *part["by_task"].values())
        table.append((name, *map(percent, rates)))
    show(f"Items right (%) without eviction and at {ratio:.0%}, mask voting, by other settings", table)
    return {"ratio": ratio, "cells": cells}


def pooled_part(engines: DemoEngines, count: int, seed: int) -> dict[str, Any]:
    """Votes pooled over windows of ``WIDTHS``, with filler and where all of the prompt is asked for; differences are of
    the same prompts, from no eviction and (with filler) from as many tokens at random."""
    kinds = {
        "with filler": {t: make_examples(t, count, seed, filler=FILLER, max_pairs=PAIRS[t]) for t in RECALL_TASKS},
        "lists, all of it asked": {t: make_examples(t, count, seed) for t in LIST_TASKS},
    }
    report: dict[str, Any] = {}
    for kind, prompts in kinds.items():

        def measure(ratio: float, prompts: dict[str, list[Example]] = prompts, **options: Any) -> dict[str, Score]:
            llm = engines(**options)
            return {task: ask(llm, examples, ratio) for task, examples in prompts.items()}

        whole, chance = measure(1.0), measure(0.25, scorer="random")
        table, cells = [("WIDTH", "retained", "items", "below no eviction", "above random at 25%", *prompts)], []
        for width, ratio in product(WIDTHS, (0.25, 0.5)):
            scores = measure(ratio, pool_kernel_size=width)
            figures = figures_of(scores) | {"pool_kernel_size": width, "ratio": ratio}
            shown = []
            for name, other in (("loss", whole), ("lead_over_random_at_25", chance)):
                both = [Score.pooled(by_task.values()) for by_task in (scores, other)]
                gain = both[0].rate - both[1].rate
                figures[name] = round(-gain if other is whole else gain, 4)
                figures[f"{name}_margin"] = round(both[0].margin_over(both[1]), 4)
                shown.append(f"{percent(figures[name])} ± {percent(figures[f'{name}_margin'])}")
            cells.append(figures)
            by_task = map(percent, figures["by_task"].values())
            table.append((str(width), f"{ratio:.0%}", percent(figures["items"]), *shown, *by_task))
        show(f"Items right (%), votes pooled, {kind}", table)
        report[kind] = {"no eviction": figures_of(whole), "random at 25%": figures_of(chance), "cells": cells}
    return report


def spared_part(engines: DemoEngines, count: int, seed: int, ratio: float = 0.5) -> dict[str, Any]:
    """Which layer's and which head's eviction costs the answers: one at a time keeps the whole prompt, which no option
    asks for."""
    prompts = {t: make_examples(t, count, seed, filler=FILLER, max_pairs=PAIRS[t]) for t in RECALL_TASKS}
    llm = engines()
    config = llm.model_config.hf_config
    vote, head_budgets, layer_budgets = maskkv.MaskKVPass._vote, maskkv.head_budgets, maskkv_plan.layer_budgets
    voting, spared = 0, (-1, -1)

    def noting(self: maskkv.MaskKVPass, layer: int, *args: Any) -> None:
        nonlocal voting
        voting = layer
        vote(self, layer, *args)

    def sparing(kind: str, scores: torch.Tensor, *args: Any, **kwargs: Any) -> list[int]:
        heads, prompt_length = scores.shape
        layer, head = spared
        whole = [voting == layer and head in (number, -1) for number in range(heads)]
        return [prompt_length if keeps else int(prompt_length * ratio) for keeps in whole]

    table, cells = [("KEPT WHOLE", "all", *RECALL_TASKS)], []
    # Pages for any head to keep the whole prompt; the heads' own budgets are in `sparing`.
    maskkv_plan.layer_budgets = lambda *args, **kwargs: [args[4]] * args[3]
    maskkv.MaskKVPass._vote, maskkv.head_budgets = noting, sparing
    maskkv_plan.prompt_budgets.cache_clear()
    layers, heads = range(config.num_hidden_layers), range(config.num_attention_heads)
    try:
        for spared in [(-1, -1), *((layer, -1) for layer in layers), *product(layers, heads)]:
            layer, head = spared
            figures = figures_of({task: ask(llm, examples, ratio) for task, examples in prompts.items()})
            cells.append({"layer": None if layer < 0 else layer, "head": None if head < 0 else head} | figures)
            name = "none" if layer < 0 else f"layer {layer}" if head < 0 else f"layer {layer}, head {head}"
            table.append((name, *map(percent, (figures["items"], *figures["by_task"].values()))))
    finally:
        maskkv_plan.layer_budgets = layer_budgets
        maskkv.MaskKVPass._vote, maskkv.head_budgets = vote, head_budgets
        maskkv_plan.prompt_budgets.cache_clear()
    show(f"Items right (%) at {ratio:.0%}, layers and heads alike, but one layer or head that evicts nothing", table)
    return {"ratio": ratio, "cells": cells}


# Whether the first pass knows


@torch.inference_mode()
def attention(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """Of a dense pass, ``[layers, heads, rows, keys]``."""
    hidden, phases = model.embed_input_ids(torch.tensor(token_ids)), model.rotary(torch.arange(len(token_ids)))
    found = []
    for layer in model.layers:
        q, k, v = layer.qkv(layer.attn_norm(hidden), phases)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        found.append(scores.softmax(dim=-1))
        hidden = hidden + layer.o_proj(torch.einsum("hqk,khd->qhd", found[-1], v))
        hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
    return torch.stack(found)


def foresight_part(engines: DemoEngines, count: int, seed: int) -> dict[str, Any]:
    """Of each token of an answer that is copied from the prompt (a city, a digit), decoded without a cache: what a
    head's mask pays its source in the first pass and in the one that fills the mask in, and how much of the prompt
    gets more votes than the source in the first pass."""
    llm = LLM(model=DEMO_MODEL, cache_method="none", trace=True)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    tokenizer, mask = llm.get_tokenizer(), runner.mask_token_id
    report: dict[str, Any] = {}
    for task in RECALL_TASKS:
        examples = make_examples(task, count, seed, filler=FILLER, max_pairs=PAIRS[task])
        conversations = [[{"role": "user", "content": example.prompt}] for example in examples]
        params = DiffusionParams(**LENGTHS, ignore_eos=True)
        measured = defaultdict(list)
        for example, output in zip(examples, llm.chat(conversations, params, use_tqdm=False), strict=True):
            prompt, response = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
            canvas, length = prompt + response, len(prompt)
            steps = enumerate(output.outputs[0].diffusion.unmasked_per_step)
            turn = dict.fromkeys(range(length), -1) | {position: step for step, found in steps for position in found}
            first = attention(runner.model, prompt + [mask] * len(response))[:, :, :, :length]
            votes = first[:, :, length:].sum(dim=2)
            for item in example.items:
                tokens = tokenizer.encode(f" {item}", add_special_tokens=False)
                source, target = find(tokens, prompt), length + find(tokens, response)
                for place in range(len(tokens) - (1 if task == "facts" else 2), len(tokens)):
                    row, key = target + place, source + place
                    known = [token if turn[p] < turn[row] else mask for p, token in enumerate(canvas)]
                    measured["first pass"].append(first[:, :, row, key])
                    measured["own pass"].append(attention(runner.model, known)[:, :, row, key])
                    measured["ranked above"].append((votes > votes[:, :, key, None]).double().mean(dim=-1))
        means = {name: torch.stack(values).double().mean(dim=0) for name, values in measured.items()}
        table, cells = [("LAYER", "HEAD", *means)], []
        for layer, head in product(*map(range, means["first pass"].shape)):
            figures = {name: round(mean[layer, head].item(), 4) for name, mean in means.items()}
            cells.append({"layer": layer, "head": head} | figures)
            table.append((str(layer), str(head), *map(percent, figures.values())))
        number = len(measured["first pass"])
        show(f"A mask's attention (%) to what it will copy, and prompt tokens (%) with more votes; {task}", table)
        report[task] = {"tokens": number, "cells": cells}
    return report


def find(tokens: list[int], text: list[int]) -> int:
    """Where ``tokens`` begin in ``text``."""
    return next(i for i in range(len(text)) if text[i : i + len(tokens)] == tokens)


# Needle in a haystack


def needle(llm: LLM, task: str, seed: int, length: int, depth: float) -> Example:
    """One asked item among ``NEEDLE_PAIRS``, ``depth`` into a prompt of about ``length`` tokens of filler."""
    (example,) = make_examples(task, 1, seed, min_pairs=NEEDLE_PAIRS, max_pairs=NEEDLE_PAIRS, filler=0.9, asked=1)
    *sentences, question = re.split(r"(?<=\.) ", example.prompt)
    asked = f"{example.items[0]}."
    sentences.remove(asked)
    fillers = [sentence for sentence in sentences if sentence.startswith("The ")]

    def prompt(dropped: int) -> str:
        rest = [sentence for sentence in sentences if sentence not in fillers[:dropped]]
        rest.insert(round(depth * len(rest)), asked)
        return " ".join([*rest, question])

    # A sentence of filler has six tokens.
    dropped = max(0, (num_tokens(llm, prompt(0)) - length) // 6)
    while dropped < len(fillers) and num_tokens(llm, prompt(dropped)) > length:
        dropped += 1
    return Example(task, prompt(dropped), example.answer, example.items)


def depth_part(engines: DemoEngines, count: int, seed: int, ratio: float = 0.25, scarce: float = 0.1) -> dict[str, Any]:
    """``count`` prompts a cell."""
    sides: dict[str, Callable[[], tuple[LLM, float]]] = {
        "no eviction": lambda: (engines(), 1.0),
        f"mask voting, {ratio:.0%}": lambda: (engines(), ratio),
        f"mask voting, {scarce:.0%}": lambda: (engines(), scarce),
        f"random, {ratio:.0%}": lambda: (engines(scorer="random"), ratio),
    }
    prompts = {}
    tokens = {}
    for length, depth in product(NEEDLE_TOKENS, NEEDLE_DEPTHS):
        tasks = (RECALL_TASKS[i % len(RECALL_TASKS)] for i in range(count))
        cell = [needle(engines(), task, seed + i, length, depth) for i, task in enumerate(tasks)]
        prompts[length, depth] = cell
        tokens[length, depth] = sum(num_tokens(engines(), example.prompt) for example in cell) / count
    report: dict[str, Any] = {"prompts_per_cell": count, "maps": {}}
    for name, side in sides.items():
        llm, share = side()
        scores = {cell: ask(llm, examples, share) for cell, examples in prompts.items()}
        table = [("DEPTH", *(f"{length} tokens" for length in NEEDLE_TOKENS))]
        for depth in NEEDLE_DEPTHS:
            table.append((f"{depth:.0%}", *(percent(scores[length, depth].rate) for length in NEEDLE_TOKENS)))
        show(f"Needle found (%), {name}; {count} prompts a cell", table)
        report["maps"][name] = [
            {"tokens": length, "mean_tokens": round(tokens[length, depth], 1), "depth": depth, "found": score.rate}
            for (length, depth), score in scores.items()
        ]
        if name != "no eviction":
            pooled = Score.pooled(scores.values())
            print(f"all cells: {percent(pooled.rate)} ± {percent(pooled.margin)}", flush=True)
    return report


# Pictures

INK, MUTED, LINE = "#1b2026", "#626b76", "#dfe2e6"
COLOURS = {"mask_voting": "#0f7c8c", "mean_query": "#ee9b1f", "snapkv": "#7a55c7", "random": "#8b95a1"}
MARKS = {"mask_voting": "o", "mean_query": "s", "snapkv": "^", "random": "x"}


def draw_budgets(report: dict[str, Any], path: Path) -> None:
    """Items right over the share retained, a panel for each kind of prompt."""
    from matplotlib.figure import Figure

    kinds = [kind for kind, part in report.items() if isinstance(part, dict) and "cells" in part]
    figure = Figure(figsize=(4.1 * len(kinds), 4.0), dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(
        "Items right by share of the prompt that MaskKV retains · demo model", size=12, weight="bold", color=INK
    )
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        whole = report[kind]["no eviction"]["items"]
        axes.axhline(100 * whole, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        for scorer in SCORERS:
            cells = [cell for cell in report[kind]["cells"] if cell["scorer"] == scorer]
            axes.errorbar(
                [100 * cell["ratio"] for cell in cells] + [100],
                [100 * cell["items"] for cell in cells] + [100 * whole],
                yerr=[100 * cell["margin"] for cell in cells] + [0],
                color=COLOURS[scorer],
                marker=MARKS[scorer],
                markersize=5,
                linewidth=1.7,
                elinewidth=0.9,
                label=scorer.replace("_", " "),
            )
        axes.set(xlim=(0, 102), ylim=(-3, 104), xlabel="retained of the prompt (%), mean over heads and layers")
        axes.set_title(f"{kind}: {', '.join(report[kind]['no eviction']['by_task'])}", size=9.5, color=INK)
        axes.set_xticks([5, 10, 25, 50, 75, 90, 100], ["5", "", "25", "50", "75", "90", ""])
        _plain(axes)
    panels[0].set_ylabel("items right (%)", color=INK, size=9)
    panels[0].annotate("no eviction", (3, 100.8), size=7.5, color=MUTED, va="bottom", annotation_clip=False)
    panels[-1].legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper left", bbox_to_anchor=(0, 0.9))
    figure.savefig(path)


def draw_depth(report: dict[str, Any], path: Path) -> None:
    """A heat map per side, every cell with its number."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    shades = LinearSegmentedColormap.from_list("found", ["#f3f4f6", "#9ad3da", "#0f7c8c"])
    maps = report["maps"]
    rows = -(-len(maps) // 2)
    figure = Figure(figsize=(9.5, 3.0 * rows + 0.4), dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(
        f"Needle in a haystack: one asked item in filler, found (%) · {report['prompts_per_cell']} prompts a cell",
        size=12,
        weight="bold",
        color=INK,
    )
    panels = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
    for axes, (name, cells) in zip(panels.flat, maps.items(), strict=False):
        found = {(cell["tokens"], cell["depth"]): 100 * cell["found"] for cell in cells}
        grid = [[found[length, depth] for length in NEEDLE_TOKENS] for depth in NEEDLE_DEPTHS]
        axes.imshow(grid, cmap=shades, vmin=0, vmax=100, aspect="auto")
        for (row, values), column in product(enumerate(grid), range(len(NEEDLE_TOKENS))):
            ink = "white" if values[column] > 70 else INK
            axes.text(column, row, f"{values[column]:.0f}", ha="center", va="center", size=9, color=ink)
        axes.hlines([row + 0.5 for row in range(len(NEEDLE_DEPTHS) - 1)], -0.5, len(NEEDLE_TOKENS) - 0.5, color="white")
        axes.vlines(
            [column + 0.5 for column in range(len(NEEDLE_TOKENS) - 1)], -0.5, len(NEEDLE_DEPTHS) - 0.5, color="white"
        )
        axes.set_title(name, size=10, color=INK)
        axes.set_xticks(range(len(NEEDLE_TOKENS)), [str(length) for length in NEEDLE_TOKENS])
        axes.set_yticks(range(len(NEEDLE_DEPTHS)), [f"{depth:.0%}" for depth in NEEDLE_DEPTHS])
        _plain(axes, grid=False)
    for axes in panels[:, 0]:
        axes.set_ylabel("depth of the asked item", color=INK, size=9)
    for axes in panels[-1]:
        axes.set_xlabel("prompt tokens", color=INK, size=9)
    figure.savefig(path)


def _plain(axes: Any, *, grid: bool = True) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, labelcolor=MUTED)
    axes.xaxis.label.set(color=INK, size=9)
    if grid:
        axes.grid(color=LINE, linewidth=0.8)
        axes.set_axisbelow(True)


PARTS = {
    "budgets": budget_part,
    "layers": layer_part,
    "settings": settings_part,
    "pooled": pooled_part,
    "spared": spared_part,
    "foresight": foresight_part,
    "depth": depth_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="none: only draw what is known")
    parser.add_argument("--count", type=int, default=180, help="prompts per task (default: %(default)s)")
    parser.add_argument("--needle-count", type=int, default=60, help="prompts per needle cell (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", type=Path, help="a file of `dllm profile demo`")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file, beside parts it has already")
    parser.add_argument(
        "--figures", type=Path, help="draw retention_budgets.png and retention_depth.png in this folder"
    )
    options = parser.parse_args()
    engines = DemoEngines(options.profile)
    report: dict[str, Any] = {}
    if options.output and options.output.exists():
        report = json.loads(options.output.read_text())
    for name in options.parts:
        start = time.perf_counter()
        part = PARTS[name](engines, options.needle_count if name == "depth" else options.count, options.seed)
        profile = json.loads(options.profile.read_text())["layer_importance"] if options.profile else None
        settings = {
            "machine": machine(),
            "seed": options.seed,
            "count": options.count,
            **LENGTHS,
            "filler": FILLER,
            "max_pairs": PAIRS,
            "profile": profile,
        }
        report[name] = {"settings": settings} | part
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        if options.output:
            options.output.write_text(json.dumps(report, indent=1) + "\n")
    if options.figures:
        options.figures.mkdir(parents=True, exist_ok=True)
        if "budgets" in report:
            draw_budgets(report["budgets"], options.figures / "retention_budgets.png")
        if "depth" in report:
            draw_depth(report["depth"], options.figures / "retention_depth.png")


if __name__ == "__main__":
    main()
