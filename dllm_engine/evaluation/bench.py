"""The benchmark: prompts of given lengths, answered several times without scores."""

import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_engine.batch.files import prompt_tokens
from dllm_engine.demo.tasks import filler_sentences, make_examples
from dllm_engine.evaluation.comparison import COST_COLUMNS, Result, Row, Task
from dllm_engine.evaluation.runner import Answer, Request

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

ASKED = 2
"""Items that each prompt of a model with a tokenizer asks for, so that answers are equally long."""
COLUMNS = {
    **{name.upper(): (name, "") for name in ("method", "unmasking", "batch", "prompt")},
    "TOKENS/S": ("score", ".1f"),
    "LOWEST": ("lowest", ".1f"),
    "HIGHEST": ("highest", ".1f"),
    "× NONE": ("over_none", ".2f"),
    "1ST BLOCK S": ("first_block_seconds", ".3f"),
    "LATENCY S": ("latency_seconds", ".3f"),
    **{title: column for title, column in COST_COLUMNS.items() if title != "TOKENS/S"},
}


@dataclass(frozen=True)
class Workload(Task):
    """Requests to measure with: ``at_once`` of them, with prompts of so many tokens, in so many rounds."""

    prompt: int
    repeats: int
    seed: int

    def score(self, llm: "LLM", answer: Answer, decoding: dict[str, Any]) -> Result:
        """The median of the rounds' tokens per second."""
        requests = self.requests(llm, decoding)
        rates = [answer(llm, requests)[1].tokens_per_second for _ in range(self.repeats)]
        about = {"batch": self.at_once, "prompt": self.prompt, "lowest": min(rates), "highest": max(rates)}
        return Result("tokens/s", statistics.median(rates), None, len(requests), about)

    def requests(self, llm: "LLM", decoding: dict[str, Any]) -> list[Request]:
        """Random tokens for a model without tokenizer, whose weights are random and end tokens mean nothing; else a
        question about a few names behind filler.

        Raises:
            ValueError: the question alone is longer than the prompt.
        """
        from dllm_engine.params import DiffusionParams

        rng, count = random.Random(self.seed), self.at_once or 1
        if not llm.model_config.skip_tokenizer_init:
            tokenizer, params = llm.get_tokenizer(), DiffusionParams(**decoding)
            examples = make_examples("names", count, self.seed, min_pairs=ASKED, max_pairs=ASKED, asked=ASKED)
            return [(_padded(example.prompt, self.prompt, rng, tokenizer), params) for example in examples]
        params, size = DiffusionParams(**decoding, ignore_eos=True), llm.model_config.get_vocab_size() - 2
        return [([rng.randrange(size) for _ in range(self.prompt)], params) for _ in range(count)]


def _padded(question: str, length: int, rng: random.Random, tokenizer: Any) -> list[int]:
    """The question as a chat's only message, with filler before it, cut at the filler's start to the wanted length."""
    bare = prompt_tokens(question, tokenizer)
    if len(bare) > length:
        raise ValueError(f"a prompt of {length} tokens is too short for a question of {len(bare)}; raise --prompt")
    # As many words as tokens are wanted are more than enough: no tokenizer joins words.
    filler = " ".join(filler_sentences(rng, length))
    tokens = prompt_tokens(f"{filler} {question}", tokenizer)
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


def values_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The values of each row, and its speed over that without a cache."""
    plain = {(row.unmasking, row.task): row.score for row in rows if row.method == "none"}
    values = []
    for row in rows:
        none = plain.get((row.unmasking, row.task))
        values.append(row.values | row.details | {"over_none": row.score / none if none else None})
    return values
