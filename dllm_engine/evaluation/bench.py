"""The benchmark: prompts of given lengths are answered several times, without scores."""

import json
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_engine.checkpoints import named_shape
from dllm_engine.evaluation.comparison import COST_COLUMNS, Result, Row, Task
from dllm_engine.evaluation.runner import (
    Cost,
    MeasuredEngine,
    Request,
    complete_requests,
)

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

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
    """Workload of equal requests at once: their number, the length of prompts, and the
    number of rounds.
    """

    batch: int
    prompt: int
    repeats: int
    seed: int

    def score(self, engine: MeasuredEngine, decoding: dict[str, Any]) -> Result:
        """The median of the rounds' tokens per second."""
        requests = self.requests(engine.llm, decoding)
        rates = [
            self.cost(engine, requests).tokens_per_second for _ in range(self.repeats)
        ]
        about = {
            "batch": self.batch,
            "prompt": self.prompt,
            "lowest": min(rates),
            "highest": max(rates),
        }
        return Result("tokens/s", statistics.median(rates), None, len(requests), about)

    def cost(self, engine: MeasuredEngine, requests: Sequence[Request]) -> Cost:
        """The cost of a round."""
        return engine.complete(requests)[1]

    def requests(self, llm: "LLM", decoding: dict[str, Any]) -> list[Request]:
        """Requests with random tokens that ignore end tokens, so that each row does the
        same work.
        """
        from dllm_engine.params import DiffusionParams

        params = DiffusionParams(**decoding | {"ignore_eos": True})
        draw = random_tokens(llm, self.seed)
        return [(draw(self.prompt), params) for _ in range(self.batch)]


@dataclass(frozen=True)
class SharedWorkload(Workload):
    """Workload whose prompts begin with the same ``shared`` tokens."""

    shared: int

    def requests(self, llm: "LLM", decoding: dict[str, Any]) -> list[Request]:
        requests = super().requests(llm, decoding)
        beginning = requests[0][0][: self.shared]
        return [
            (beginning + prompt[self.shared :], params) for prompt, params in requests
        ]


class SecondRequest(SharedWorkload):
    """Workload that measures only the last request, after the others."""

    def cost(self, engine: MeasuredEngine, requests: Sequence[Request]) -> Cost:
        *first, last = requests
        return engine.complete([last], before=first)[1]


@dataclass(frozen=True)
class Chats(SharedWorkload):
    """Workload of several chats at once. Each turn adds the same number of new tokens."""

    turns: int

    def cost(self, engine: MeasuredEngine, requests: Sequence[Request]) -> Cost:
        draw = random_tokens(engine.llm, self.seed + 1)
        completions, cost = engine.complete(requests)
        for _ in range(1, self.turns):
            requests = [
                (
                    [*prompt, *answer.token_ids, *draw(self.prompt - self.shared)],
                    params,
                )
                for (prompt, params), answer in zip(requests, completions, strict=True)
            ]
            completions, turn = complete_requests(engine.llm, requests)
            for sums in (cost, engine.cost):
                sums.add(turn)
        return cost


def random_tokens(llm: "LLM", seed: int) -> Callable[[int], list[int]]:
    """Draw tokens that a prompt may have."""
    mask = llm.model_config.hf_config.mask_token_id
    tokens = [
        token for token in range(llm.model_config.get_vocab_size()) if token != mask
    ]
    rng = random.Random(seed)
    return lambda count: rng.choices(tokens, k=count)


def random_engine(model: str, **settings: Any) -> "LLM":
    """Start an engine of a named shape with random weights and without tokenizer.
    ``settings``: arguments of ``LLM``.
    """
    from dllm_engine.llm import LLM

    with tempfile.TemporaryDirectory(prefix="dllm-shape-") as name:
        (Path(name) / "config.json").write_text(
            json.dumps(named_shape(model)), encoding="utf-8"
        )
        return LLM(
            model=name, load_format="dummy", skip_tokenizer_init=True, **settings
        )


def values_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The values of each row, with its speed relative to the row without a cache."""
    plain = {
        (row.unmasking, row.task): row.result.score
        for row in rows
        if row.method == "none"
    }
    values = []
    for row in rows:
        none = plain.get((row.unmasking, row.task))
        values.append(
            row.values | {"over_none": row.result.score / none if none else None}
        )
    return values
