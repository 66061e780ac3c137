"""Exact match with and without ``share_prompts``, by cache method and anchors.

Questions about one text, second turns of chats about another text, prompts that begin
with the same solved examples, and decisions about one text, by the demo model. Each row
answers the same requests in the same order; ``same`` is the share of answers that are
those without sharing, and ``read`` that of prompt tokens that were read from pages.

    python benchmarks/shared_prompts.py [--count N] [--output FILE.json]

``--count`` requests of each kind; a plot lies beside ``--output``.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from program import Rows, argument_parser, report

from dllm_engine import DiffusionParams
from dllm_engine.demo.tasks import CITIES, NAMES, make_examples
from dllm_engine.evaluation.plots import plot_beside

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from dllm_engine import LLM

PAGE_SIZE = 16
AT_ONCE = 64
FACTS_PER_TEXT = 36
QUESTIONS_PER_TEXT = 8
METHODS = ("none", "prefix", "dual", "sparse")
ANCHORS = (0, 16, 64)
WITHOUT = "without"
SETTINGS: dict[str, dict[str, Any]] = {
    WITHOUT: {},
    **{
        f"anchors {count}": {"share_prompts": True, "anchor_tokens": count}
        for count in ANCHORS
    },
}
PARAMS = DiffusionParams(gen_length=32, block_length=8)
Chat = list[dict[str, str]]
Asked = tuple[Sequence["RequestOutput"], list[str]]
"""Answers, and what they should be."""


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    figures: Rows = []
    for method in METHODS:
        plain: dict[str, list[str]] = {}
        for setting, settings in SETTINGS.items():
            llm = load(method, settings)
            for kind, answered in KINDS.items():
                llm.reset_prefix_cache()
                outputs, expected = answered(llm, options.count)
                texts = [output.outputs[0].text.strip() for output in outputs]
                plain.setdefault(kind, texts)
                row = {"prompts": kind, "method": method, "setting": setting}
                figures.append(row | figures_of(outputs, texts, expected, plain[kind]))
            llm.llm_engine.engine_core.shutdown()
    report(options, figures)
    draw(figures, plot_beside(options.output))


def load(method: str, settings: dict[str, Any]) -> "LLM":
    from dllm_engine import LLM

    return LLM(
        "demo",
        cache_method=method,
        page_size=PAGE_SIZE,
        max_model_len=512,
        max_num_seqs=AT_ONCE,
        kv_cache_memory_bytes=1 << 30,
        **settings,
    )


def figures_of(
    outputs: Sequence["RequestOutput"],
    texts: list[str],
    expected: list[str],
    plain: list[str],
) -> dict[str, Any]:
    """Figures of answers. ``plain``: those without sharing."""
    num_tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_read = sum(output.num_cached_tokens or 0 for output in outputs)
    num_right = sum(a == b for a, b in zip(texts, expected, strict=True))
    return {
        "requests": len(texts),
        "exact match %": 100 * num_right / len(texts),
        "read %": 100 * num_read / num_tokens,
        "others": sum(a != b for a, b in zip(texts, plain, strict=True)),
    }


def ask(llm: "LLM", chats: Sequence[Chat]) -> Any:
    return llm.chat(list(chats), PARAMS, use_tqdm=False)


def ask_about_texts(llm: "LLM", count: int) -> Asked:
    """Several questions about each text of facts, which it begins with."""
    asked = questions_about_texts(count)
    chats = [[user(f"{text} Where does {name} live?")] for text, name, _ in asked]
    return ask(llm, chats), [answer(name, city) for _, name, city in asked]


def decide_about_texts(llm: "LLM", count: int) -> Asked:
    """The same questions as decisions."""
    from dllm_engine.decisions.requests import decision_params, schema_of

    asked = questions_about_texts(count)
    prompts = [f"{text} Where does {name} live?" for text, name, _ in asked]
    params = [
        decision_params(
            schema_of({"city": list(CITIES)}),
            llm.get_tokenizer(),
            llm.llm_engine.vllm_config,
            template=f" {answer(name, '{city}')}",
        )
        for _, name, _ in asked
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return outputs, [answer(name, city) for _, name, city in asked]


def ask_again(llm: "LLM", count: int) -> Asked:
    """The second turn of a chat, which asks about another text than the first."""
    texts = texts_of_facts(2 * count)
    firsts, seconds, expected = [], [], []
    for (text, facts, draw), (other, others, _) in zip(
        texts[::2], texts[1::2], strict=True
    ):
        name, second = draw.choice(sorted(facts)), draw.choice(sorted(others))
        firsts.append([user(f"{text} Where does {name} live?")])
        seconds.append(user(f"{other} Where does {second} live?"))
        expected.append(answer(second, others[second]))
    chats = [
        [*first, {"role": "assistant", "content": output.outputs[0].text}, second]
        for first, output, second in zip(firsts, ask(llm, firsts), seconds, strict=True)
    ]
    return ask(llm, chats), expected


def ask_by_example(llm: "LLM", count: int) -> Asked:
    """Solved examples before each request."""
    examples = make_examples("facts", count + 4, 1, pairs=(4, 6), asked=1)
    solved = " ".join(f"{each.prompt} {each.answer}" for each in examples[:4])
    chats = [[user(f"{solved} {example.prompt}")] for example in examples[4:]]
    return ask(llm, chats), [example.answer for example in examples[4:]]


KINDS: dict[str, Callable[["LLM", int], Asked]] = {
    "one text": ask_about_texts,
    "second turn": ask_again,
    "few-shot": ask_by_example,
    "decisions": decide_about_texts,
}


def questions_about_texts(count: int) -> list[tuple[str, str, str]]:
    """Texts, a name in each, and where it lives; several names of each text."""
    return [
        (text, name, facts[name])
        for text, facts, draw in texts_of_facts(-(-count // QUESTIONS_PER_TEXT))
        for name in draw.sample(sorted(facts), QUESTIONS_PER_TEXT)
    ][:count]


def texts_of_facts(count: int) -> list[tuple[str, dict[str, str], random.Random]]:
    """Texts, where each one's subjects live, and what draws questions about it."""
    texts = []
    for number in range(count):
        draw = random.Random(number)
        facts = {
            name: draw.choice(CITIES) for name in draw.sample(NAMES, FACTS_PER_TEXT)
        }
        text = " ".join(f"{name} lives in {city}." for name, city in facts.items())
        texts.append((text, facts, draw))
    return texts


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(name: str, city: str) -> str:
    return f"{name} lives in {city}."


def draw(figures: Rows, path: Path | None) -> None:
    """Draw a panel for each kind of prompts: exact match by setting, a line for each
    method."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(KINDS), sharey=True)
    for axes, kind in zip(panels, KINDS, strict=True):
        axes.set(title=kind, xlabel="anchor_tokens")
        axes.grid(alpha=0.3)
        for method in METHODS:
            scores = [
                row["exact match %"]
                for row in figures
                if (row["prompts"], row["method"]) == (kind, method)
            ]
            axes.plot([WITHOUT, *map(str, ANCHORS)], scores, "o-", label=method)
    panels[0].set_ylabel("exact match (%)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path)


if __name__ == "__main__":
    main()
