"""What evicting prompt tokens costs in answers: MaskKV's retention on the demo model, by budget, scorer and settings.

Most of a prompt is filler nobody asks about. A response is scored per asked item, so an answer can be partly right.

    python benchmarks/retention_quality.py [--count 180] [--profile FILE] [--output FILE.json]

Parts, all by default: `budgets` (share of the prompt retained × scorer, with and without filler), `layers` (layer
budgets × head budgets at 25%), `settings` (what else could matter, at 50%), `pooled` (votes pooled over neighbours).
A row's loss is from no eviction, its lead over as many tokens retained at random; both are differences over the same
prompts, and every margin is half a 95% interval. Decoding is greedy, so that a run repeats exactly. `--profile` is a
file of `dllm profile`; without one the layer budgets that need it are uniform.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

from program import Rows, argument_parser, parse, report

from dllm_engine import LLM, DiffusionParams
from dllm_engine.demo import DEMO_MODEL
from dllm_engine.demo.tasks import LIST_TASKS, RECALL_TASKS, Example, item_matches, make_examples

LENGTHS = {"gen_length": 32, "block_length": 8}
FILLER, PAIRS = 0.7, {"names": 12, "keys": 10, "facts": 10}
"""As much filler as the demo model was trained with, and the most pairs that then fit the lengths it was trained
with."""
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"refresh_first_layer": True},
    {"response_refresh_interval": 1},
    {"prompt_refresh_interval": 16},
    {"prompt_refresh_interval": 1, "response_refresh_interval": 1},
    {"layer_budget": "uniform"},
    {"head_budget": "uniform"},
    {"layer_budget": "uniform", "head_budget": "uniform"},
    {"redistribute": True},
)
WITH_FILLER, WITHOUT_FILLER, LISTS = "with filler", "without filler", "lists, all of it asked"


@dataclass(frozen=True)
class Part:
    """Cache options × shares of the prompt that a KV head retains on average, over some kinds of prompts."""

    prompts: tuple[str, ...]
    options: Sequence[dict[str, Any]]
    ratios: tuple[float, ...]


PARTS = {
    "budgets": Part(
        (WITH_FILLER, WITHOUT_FILLER, LISTS),
        [{"scorer": name} for name in ("mask_voting", "mean_query", "snapkv", "random")],
        (0.05, 0.1, 0.25, 0.5, 0.75, 0.9),
    ),
    "layers": Part(
        (WITH_FILLER,),
        [
            {"layer_budget": layers, "head_budget": heads}
            for layers, heads in product(
                ("uniform", "boundary", "pyramid", "squeeze"), ("uniform", "prompt_preference", "adaptive")
            )
        ],
        (0.25,),
    ),
    "settings": Part((WITH_FILLER,), SETTINGS, (0.5,)),
    # A width of 1 is the paper's, 5 SnapKV's.
    "pooled": Part((WITH_FILLER, LISTS), [{"pool_kernel_size": width} for width in (1, 3, 5, 7)], (0.25, 0.5)),
}


def draw_prompts(kind: str, count: int, seed: int) -> dict[str, list[Example]]:
    """``count`` examples of each task."""
    if kind == LISTS:
        return {task: make_examples(task, count, seed) for task in LIST_TASKS}
    filler = FILLER if kind == WITH_FILLER else 0.0
    return {task: make_examples(task, count, seed, filler=filler, max_pairs=PAIRS[task]) for task in RECALL_TASKS}


@dataclass(frozen=True)
class Score:
    """Items right and items asked, per prompt."""

    right: tuple[int, ...]
    asked: tuple[int, ...]

    @property
    def rate(self) -> float:
        return sum(self.right) / sum(self.asked)

    def margin_over(self, other: "Score | None") -> float:
        """Half a 95% interval of the rate, or of its difference from another score of the same prompts.

        Items of one prompt are not independent, prompts are.
        """
        gained = self.right if other is None else [a - b for a, b in zip(self.right, other.right, strict=True)]
        mean = sum(gained) / sum(self.asked)
        squares = sum((g - mean * n) ** 2 for g, n in zip(gained, self.asked, strict=True))
        return 1.96 * math.sqrt(squares) / sum(self.asked)

    @classmethod
    def pooled(cls, scores: "Iterable[Score]") -> "Score":
        parts = list(scores)
        return cls(tuple(chain(*(p.right for p in parts))), tuple(chain(*(p.asked for p in parts))))


class Measurement:
    """MaskKV engines on the demo model by their options, and what they answered.

    Each engine serves all budgets, as requests may lower theirs. All live until the process ends: shutting one down
    would take vLLM's process groups from the others.
    """

    def __init__(self, profile: Path | None, count: int, seed: int) -> None:
        self.profile = {} if profile is None else {"profile": str(profile)}
        self.count, self.seed = count, seed
        self._engines: dict[str, LLM] = {}
        self._scores: dict[tuple[str, str, float], dict[str, Score]] = {}

    def scores(self, kind: str, options: dict[str, Any], ratio: float) -> dict[str, Score]:
        """By task, with ``ratio`` of each prompt retained."""
        options = {"kv_budget": None, "retention_ratio": 1.0} | self.profile | options
        key = json.dumps(options, sort_keys=True)
        if (kind, key, ratio) not in self._scores:
            if key not in self._engines:
                self._engines[key] = LLM(
                    model=DEMO_MODEL, cache_method="maskkv", cache_options=options, kv_cache_memory_bytes=256 << 20
                )
            prompts = draw_prompts(kind, self.count, self.seed)
            self._scores[kind, key, ratio] = {
                task: ask(self._engines[key], examples, ratio) for task, examples in prompts.items()
            }
        return self._scores[kind, key, ratio]

    def row(self, kind: str, options: dict[str, Any], ratio: float) -> dict[str, Any]:
        scores = self.scores(kind, options, ratio)
        found, whole, chance = (
            Score.pooled(by_task.values())
            for by_task in (scores, self.scores(kind, {}, 1.0), self.scores(kind, {"scorer": "random"}, ratio))
        )
        return {
            "prompts": kind,
            **options,
            "retained": ratio,
            "items": found.rate,
            "margin": found.margin_over(None),
            "loss": whole.rate - found.rate,
            "loss_margin": found.margin_over(whole),
            "lead": found.rate - chance.rate,
            "lead_margin": found.margin_over(chance),
            **{task: score.rate for task, score in scores.items()},
        }


def ask(llm: LLM, examples: Sequence[Example], ratio: float) -> Score:
    """Answer the examples, retaining ``ratio`` of each prompt; request i draws its noise from seed i."""
    conversations = [[{"role": "user", "content": example.prompt}] for example in examples]
    params = [DiffusionParams(**LENGTHS, retention_ratio=ratio, seed=i) for i in range(len(examples))]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    right = tuple(item_matches(o.outputs[0].text, e) for o, e in zip(outputs, examples, strict=True))
    return Score(right, tuple(len(example.items) for example in examples))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--count", type=int, default=180, help="prompts per task (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", type=Path, help="a file of `dllm profile demo`")
    options = parse(parser)
    measurement = Measurement(options.profile, options.count, options.seed)
    sections: dict[str, Rows] = {}
    for name in options.parts:
        part = PARTS[name]
        sections[name] = [measurement.row(*cell) for cell in product(part.prompts, part.options, part.ratios)]
    importance = json.loads(options.profile.read_text())["layer_importance"] if options.profile else []
    options.profile = importance
    report(options, **sections)


if __name__ == "__main__":
    main()
