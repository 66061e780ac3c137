"""The benchmark: the runner without scores, on prompts of given lengths, several times each."""

import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_engine.batch.files import BatchRequest
from dllm_engine.demo.tasks import filler_sentences, make_examples
from dllm_engine.evaluation.comparison import COST_COLUMNS, UNKNOWN, Combination
from dllm_engine.evaluation.runner import Answer, Answers, Cost, LoadEngine, Request, Runner, Tell
from dllm_engine.text import format_table

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

ASKED = 2
"""Items that each prompt of a model with a tokenizer asks for, so that answers are equally long."""
KEY = ("method", "unmasking", "batch", "prompt")
COLUMNS = {
    **{name.upper(): (name, "") for name in KEY},
    "TOKENS/S": ("tokens_per_second", ".1f"),
    "LOWEST": ("lowest", ".1f"),
    "HIGHEST": ("highest", ".1f"),
    "× NONE": ("over_none", ".2f"),
    "1ST BLOCK S": ("first_block_seconds", ".3f"),
    "LATENCY S": ("latency_seconds", ".3f"),
    **{title: column for title, column in COST_COLUMNS.items() if title != "TOKENS/S"},
}
Cell = dict[str, Any]
"""A row of the table; its key is ``KEY``."""


@dataclass(frozen=True)
class Workload:
    """Requests to measure with: so many at once, with prompts of so many tokens, in so many rounds."""

    batches: Sequence[int]
    prompts: Sequence[int]
    repeats: int
    seed: int

    def requests(self, llm: "LLM", length: int, batch: int, decoding: dict[str, Any]) -> list[Request]:
        """Prompts of exactly ``length`` tokens: random ones for a model without tokenizer, whose weights are random
        and end tokens mean nothing, else a question about a few names behind filler.

        Raises:
            ValueError: the question alone is longer.
        """
        from dllm_engine.params import DiffusionParams

        rng = random.Random(self.seed)
        if not llm.model_config.skip_tokenizer_init:
            tokenizer, params = llm.get_tokenizer(), DiffusionParams(**decoding)
            examples = make_examples("names", batch, self.seed, min_pairs=ASKED, max_pairs=ASKED, asked=ASKED)
            return [(_padded(example.prompt, length, rng, tokenizer), params) for example in examples]
        params, size = DiffusionParams(**decoding, ignore_eos=True), llm.model_config.get_vocab_size() - 2
        return [([rng.randrange(size) for _ in range(length)], params) for _ in range(batch)]


def _padded(question: str, length: int, rng: random.Random, tokenizer: Any) -> list[int]:
    """The question as a chat's only message, with filler before it, cut at the filler's start to the wanted length."""
    bare = BatchRequest(prompt=question).prompt_tokens(tokenizer)
    if len(bare) > length:
        raise ValueError(f"a prompt of {length} tokens is too short for a question of {len(bare)}; raise --prompt")
    # As many words as tokens are wanted are more than enough: no tokenizer joins words.
    filler = " ".join(filler_sentences(rng, length))
    tokens = BatchRequest(prompt=f"{filler} {question}").prompt_tokens(tokenizer)
    # The chat template's beginning stays.
    start = next((i for i, (a, b) in enumerate(zip(tokens, bare, strict=False)) if a != b), len(bare))
    return tokens[:start] + tokens[start + len(tokens) - length :]


def random_engine(config: dict[str, Any], **settings: Any) -> "LLM":
    """An engine of a ``config.json`` with random weights, without tokenizer; ``settings`` are those of ``LLM``.

    Values of weights do not change the time.
    """
    from dllm_engine.llm import LLM

    with tempfile.TemporaryDirectory(prefix="dllm-shape-") as name:
        (Path(name) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return LLM(model=name, load_format="dummy", skip_tokenizer_init=True, **settings)


def measure(
    combinations: Sequence[Combination], workload: Workload, load: LoadEngine, errors: dict[str, str]
) -> list[Cell]:
    """A cell per combination, batch and length of the prompt: means over the rounds, but a median of tokens per second.
    ``errors`` gets the reasons why some could not be measured."""
    runner, cells, rows = Runner(load), list[Cell](), {}
    for combination, prompt, batch in itertools.product(combinations, workload.prompts, workload.batches):
        names: Cell = dict(zip(KEY, (combination.method, combination.unmasking, batch, prompt), strict=True))
        rows[" ".join(map(str, names.values()))] = combination, names

    def fill(key: str, tell: Tell) -> None:
        combination, names = rows[key]

        def ask(llm: "LLM", answer: Answer) -> None:
            answer(llm, workload.requests(llm, names["prompt"], names["batch"], combination.decoding))

        total, rates = Cost(), []
        for number in range(workload.repeats + 1):
            answers = Answers()
            runner.run(combination.engine, ask, answers, names["batch"])
            if number:  # the first round warms up
                total.add(answers.cost)
                rates.append(answers.cost.tokens_per_second)
            tell(1 / (workload.repeats + 1))
        rate = {"tokens_per_second": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}
        cells.append(names | total.figures | rate)

    runner.each({key: combination.engine for key, (combination, _) in rows.items()}, fill, errors)
    if not cells:
        raise ValueError(next(iter(errors.values())))
    plain = {tuple(cell[name] for name in KEY[1:]): cell for cell in cells if cell["method"] == "none"}
    for cell in cells:
        none = plain.get(tuple(cell[name] for name in KEY[1:]), {}).get("tokens_per_second")
        cell["over_none"] = cell["tokens_per_second"] / none if none else None
    return cells


def comparison(first: dict[str, Any], second: dict[str, Any], names: Sequence[str]) -> str:
    """Ratios second / first of the cells that two reports have in common, and the settings in which they differ."""
    before, after = ({tuple(cell[name] for name in KEY): cell for cell in r["cells"]} for r in (first, second))
    figures = {title: name for title, (name, _) in COLUMNS.items() if name not in (*KEY, "over_none")}
    rows = [[*map(str.upper, KEY), *figures]]
    for key in filter(after.__contains__, before):
        pairs = [(before[key][name], after[key][name]) for name in figures.values()]
        rows.append([*map(str, key), *(f"{b / a:.2f}" if a and b is not None else UNKNOWN for a, b in pairs)])
    lines = [f"{names[1]} over {names[0]}, figure by figure; 1 is no change."]
    for part in ("machine", "settings"):
        for name, value in first[part].items():
            if name != "date" and second[part].get(name) != value:
                lines.append(f"Note: {name} was {value}, then {second[part].get(name)}.")
    if num_alone := len(before.keys() ^ after.keys()):
        lines.append(f"Note: {num_alone} rows are in one of the files alone.")
    return "\n".join([*lines, "", format_table(rows)])
