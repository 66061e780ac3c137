"""Exact match with and without ``share_prompts``, by cache method and anchors.

Questions about one text, second turns of chats about another text, and prompts that
begin with the same solved examples, by the demo model. Each row answers the same
requests in the same order; ``same`` is the share of answers that are those without
sharing, and ``read`` that of prompt tokens that were read from pages.

    python benchmarks/shared_prompts.py [--count N] [--methods NAME,…] [--output
    FILE.json]

``--count`` requests of each kind; a plot lies beside ``--output``.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from program import Rows, argument_parser, report

from dllm_engine.demo.tasks import CITIES, NAMES, make_examples
from dllm_engine.evaluation.plots import plot_beside

PAGE_SIZE = 16
QUESTIONS_PER_TEXT = 8
SETTINGS: dict[str, dict[str, Any]] = {
    "without": {},
    **{
        f"anchors {count}": {"share_prompts": True, "anchor_tokens": count}
        for count in (0, 16, 64)
    },
}
Chat = list[dict[str, str]]


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--methods", default="none,prefix,dual,sparse")
    options = parser.parse_args()
    rows: Rows = []
    for method in options.methods.split(","):
        plain: dict[str, list[str]] = {}
        for setting, settings in SETTINGS.items():
            answers = Answers(method, settings)
            for kind, asked in KINDS.items():
                texts, right, read = asked(answers, options.count)
                plain.setdefault(kind, texts)
                same = [a == b for a, b in zip(texts, plain[kind], strict=True)]
                rows.append(
                    {
                        "prompts": kind,
                        "method": method,
                        "setting": setting,
                        "requests": len(texts),
                        "exact match": f"{100 * sum(right) / len(texts):.1f} %",
                        "same": f"{100 * sum(same) / len(texts):.1f} %",
                        "read": f"{100 * read:.0f} %",
                    }
                )
            answers.llm.llm_engine.engine_core.shutdown()
    report(options, rows)
    draw(rows, plot_beside(options.output))


class Answers:
    """An engine that answers chats one batch after the other."""

    def __init__(self, method: str, settings: dict[str, Any]) -> None:
        from dllm_engine import LLM, DiffusionParams

        self.llm = LLM(
            "demo",
            cache_method=method,
            page_size=PAGE_SIZE,
            max_model_len=512,
            kv_cache_memory_bytes=256 << 20,
            **settings,
        )
        self.params = DiffusionParams(gen_length=32, block_length=8)

    def to(self, chats: Sequence[Chat]) -> tuple[list[str], float]:
        """The answers, and the share of prompt tokens that were read from pages."""
        outputs = self.llm.chat(list(chats), self.params, use_tqdm=False)
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        num_read = sum(output.num_cached_tokens or 0 for output in outputs)
        return [output.outputs[0].text for output in outputs], num_read / num_tokens


Asked = tuple[list[str], list[bool], float]
"""Answers, which of them are right, and the share of prompt tokens that was read."""


def asked_about_texts(answers: Answers, count: int) -> Asked:
    """Several questions about each text of facts, which it begins with."""
    chats, expected = [], []
    for text, facts, draw in texts_of_facts(-(-count // QUESTIONS_PER_TEXT)):
        for name in draw.sample(sorted(facts), QUESTIONS_PER_TEXT):
            chats.append([user(f"{text} Where does {name} live?")])
            expected.append(f"{name} lives in {facts[name]}.")
    return scored(answers, chats[:count], expected[:count])


def asked_again(answers: Answers, count: int) -> Asked:
    """The second turn of a chat, which asks about another text than the first."""
    texts = texts_of_facts(2 * count)
    firsts, seconds, expected = [], [], []
    for (text, facts, draw), (other, others, _) in zip(
        texts[::2], texts[1::2], strict=True
    ):
        name, second = draw.choice(sorted(facts)), draw.choice(sorted(others))
        firsts.append([user(f"{text} Where does {name} live?")])
        seconds.append(user(f"{other} Where does {second} live?"))
        expected.append(f"{second} lives in {others[second]}.")
    own, _ = answers.to(firsts)
    chats = [
        [*first, {"role": "assistant", "content": answer}, second]
        for first, answer, second in zip(firsts, own, seconds, strict=True)
    ]
    return scored(answers, chats, expected)


def asked_by_example(answers: Answers, count: int) -> Asked:
    """Solved examples before each request."""
    examples = make_examples("facts", count + 4, 1, pairs=(4, 6), asked=1)
    solved = " ".join(f"{each.prompt} {each.answer}" for each in examples[:4])
    chats = [[user(f"{solved} {example.prompt}")] for example in examples[4:]]
    return scored(answers, chats, [example.answer for example in examples[4:]])


KINDS = {
    "one text": asked_about_texts,
    "second turn": asked_again,
    "few-shot": asked_by_example,
}


def texts_of_facts(count: int) -> list[tuple[str, dict[str, str], random.Random]]:
    """Texts, where each one's subjects live, and what draws questions about it."""
    texts = []
    for number in range(count):
        draw = random.Random(number)
        facts = {name: draw.choice(CITIES) for name in draw.sample(NAMES, 20)}
        text = " ".join(f"{name} lives in {city}." for name, city in facts.items())
        texts.append((text, facts, draw))
    return texts


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def scored(answers: Answers, chats: Sequence[Chat], expected: list[str]) -> Asked:
    texts, read = answers.to(chats)
    right = [a.strip() == b for a, b in zip(texts, expected, strict=True)]
    return texts, right, read


def draw(rows: Rows, path: Path | None) -> None:
    """Draw a panel for each kind of prompts: exact match by setting, a line for each
    method."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(KINDS), sharey=True)
    for axes, kind in zip(panels, KINDS, strict=True):
        axes.set(title=kind, ylim=(0, 103))
        axes.grid(alpha=0.3)
        for method in dict.fromkeys(row["method"] for row in rows):
            own = [r for r in rows if r["prompts"] == kind and r["method"] == method]
            scores = [float(row["exact match"].split()[0]) for row in own]
            axes.plot([row["setting"] for row in own], scores, "o-", label=method)
    panels[0].set_ylabel("exact match (%)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path)


if __name__ == "__main__":
    main()
