"""Rules that choose the length of a hole, on texts cut at random.

Each text loses a part of known length, and each rule says how long the part was.
``error`` is the mean distance from that length, ``exact`` the share of parts that come
back as they were, and ``passes`` the canvases that a rule computes before decoding.

    python benchmarks/hole_lengths.py [--model MODEL] [--files FILE …] [--count N]
    [--output FILE.json]

The texts are answers of the demo model's tasks, or lines of ``--files`` with the lines
around them.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from program import Rows, argument_parser, report

from dllm_engine.batch import prompt_tokens
from dllm_engine.decoding.probe import Logprobs
from dllm_engine.demo.tasks import TASKS, make_examples
from dllm_engine.lengths.forward_passes import answers_of, result_of
from dllm_engine.lengths.holes import Hole, ranked_lengths

LONGEST, BUDGET, AROUND = 12, 32, 96
"""Tokens of a part, of a hole, and of the text on either side."""


class Cut(NamedTuple):
    """A text without a part."""

    before: list[int]
    part: list[int]
    behind: list[int]


def main() -> None:
    from dllm_engine import LLM

    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--files", nargs="*", type=Path)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    llm = LLM(options.model, max_model_len=512)
    tokenizer = llm.get_tokenizer()
    draw = random.Random(0)
    if options.files:
        cuts = cut_lines(tokenizer, options.files, options.count, draw)
    else:
        cuts = cut_answers(tokenizer, options.count, draw)
    rows: Rows = []
    for name, rule in RULES.items():
        # Each canvas is computed by this call.
        with mock.patch.object(llm, "collective_rpc", wraps=llm.collective_rpc) as rpc:
            sizes = [rule(llm, cut) for cut in cuts]
        canvases = [
            canvas for call in rpc.mock_calls for canvas in call.kwargs["args"][0]
        ]
        errors = [
            abs(size - len(cut.part)) for size, cut in zip(sizes, cuts, strict=True)
        ]
        right = [
            tokenizer.decode(part) == tokenizer.decode(cut.part)
            for part, cut in zip(decoded(llm, cuts, sizes), cuts, strict=True)
        ]
        rows.append(
            {
                "rule": name,
                "error": f"{sum(errors) / len(cuts):.2f}",
                "exact": f"{sum(right) / len(cuts):.2f}",
                "passes": f"{len(canvases) / len(cuts):.1f}",
            }
        )
    report(options, rows)


def cut_answers(tokenizer: Any, count: int, draw: random.Random) -> list[Cut]:
    """Answers of the demo model's tasks, behind their prompts."""
    cuts = []
    for task in TASKS:
        for example in make_examples(task, -(-count // len(TASKS)), seed=7):
            prompt = prompt_tokens(example.prompt, tokenizer)
            answer = tokenizer.encode(f" {example.answer}", add_special_tokens=False)
            cuts.append(cut(prompt, answer, [], draw))
    return cuts[:count]


def cut_lines(
    tokenizer: Any, files: Sequence[Path], count: int, draw: random.Random
) -> list[Cut]:
    """Lines of files, with the text around them."""
    cuts: list[Cut] = []
    while len(cuts) < count:
        lines = draw.choice(files).read_text(encoding="utf-8").splitlines(keepends=True)
        number = draw.randrange(len(lines))
        texts = ("".join(lines[:number]), lines[number], "".join(lines[number + 1 :]))
        before, line, behind = (
            tokenizer.encode(text, add_special_tokens=False) for text in texts
        )
        if len(before) >= AROUND and len(line) >= 4 and len(behind) >= AROUND:
            cuts.append(cut(before[-AROUND:], line, behind[:AROUND], draw))
    return cuts


def cut(
    before: list[int], text: list[int], behind: list[int], draw: random.Random
) -> Cut:
    """Leave a part out of a text, but not its last token."""
    size = draw.randint(0, min(LONGEST, len(text) - 1))
    start = draw.randint(0, len(text) - 1 - size)
    stop = start + size
    return Cut(before + text[:start], text[start:stop], text[stop:] + behind)


def cal(llm: Any, cut: Cut) -> int:
    """CAL (arXiv 2602.00476), with the constants of its authors' code."""
    sureness: dict[int, float] = {}

    def calibrated(size: int) -> float:
        if size not in sureness:
            (answer,) = answers_of(llm, [hole_of(cut).closed_probe(size)])
            mean = sum(map(math.exp, answer.likeliest[:size])) / size
            bias = math.exp(-1.77 * size) + 0.56 * math.exp(-0.06 * size) + 0.24
            sureness[size] = mean / bias
        return sureness[size]

    for step in (1, -1):
        best, falls, size = calibrated(8), 0, 8 + step
        while falls < 4 and 1 <= size <= BUDGET:
            falls = 0 if calibrated(size) > best else falls + 1
            best = max(best, calibrated(size))
            size += step
    return max(sureness, key=lambda size: sureness[size])


def joins(hole: Hole, size: int, answer: Logprobs) -> float:
    return sum(answer.tokens[size:])


def with_prior(hole: Hole, size: int, answer: Logprobs) -> float:
    """The score with a geometric prior, whose mean is 16 tokens."""
    return hole.score(size, answer) - size / 16


def best_of_all(
    score: Callable[[Hole, int, Logprobs], float], llm: Any, cut: Cut
) -> int:
    """The best length by a canvas for each."""
    hole = hole_of(cut)
    answers = answers_of(llm, map(hole.closed_probe, hole.sizes))
    scores = {
        size: score(hole, size, answer)
        for size, answer in zip(hole.sizes, answers, strict=True)
    }
    return max(hole.sizes, key=lambda size: scores[size])


def as_built(llm: Any, cut: Cut) -> int:
    (lengths,) = result_of(llm, ranked_lengths([hole_of(cut)]))
    return lengths[0]


def hole_of(cut: Cut) -> Hole:
    return Hole(cut.before, cut.behind, range(BUDGET + 1))


def decoded(llm: Any, cuts: Sequence[Cut], sizes: Sequence[int]) -> list[list[int]]:
    """The tokens of each hole, of such a size, by greedy decoding."""
    from dllm_engine import DiffusionParams

    open_cuts = [(cut, size) for cut, size in zip(cuts, sizes, strict=True) if size]
    outputs = llm.generate(
        [{"prompt_token_ids": cut.before} for cut, _ in open_cuts],
        [
            DiffusionParams(
                response_template=[*[None] * size, *cut.behind], return_given=False
            )
            for cut, size in open_cuts
        ],
        use_tqdm=False,
    )
    parts = iter(list(output.outputs[0].token_ids) for output in outputs)
    return [next(parts) if size else [] for size in sizes]


RULES: dict[str, Callable[[Any, Cut], int]] = {
    "16 tokens": lambda llm, cut: 16,
    "CAL": cal,
    "joins of every length": partial(best_of_all, joins),
    "joins and sureness of every length": partial(best_of_all, Hole.score),
    "joins, sureness and a prior": partial(best_of_all, with_prior),
    "as built": as_built,
    "the true length": lambda llm, cut: len(cut.part),
}


if __name__ == "__main__":
    main()
