"""The benchmark: prompts of given lengths, answered several times without scores."""

import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_engine.checkpoints import named_shape
from dllm_engine.evaluation.comparison import COST_COLUMNS, Result, Row, Task
from dllm_engine.evaluation.runner import MeasuredEngine, Request

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
    """So many requests at once, with prompts of so many tokens, in so many rounds."""

    batch: int
    prompt: int
    repeats: int
    seed: int

    def score(self, engine: MeasuredEngine, decoding: dict[str, Any]) -> Result:
        """The median of the rounds' tokens per second."""
        requests = self.requests(engine.llm, decoding)
        rates = [
            engine.complete(requests)[1].tokens_per_second for _ in range(self.repeats)
        ]
        about = {
            "batch": self.batch,
            "prompt": self.prompt,
            "lowest": min(rates),
            "highest": max(rates),
        }
        return Result("tokens/s", statistics.median(rates), None, len(requests), about)

    def requests(self, llm: "LLM", decoding: dict[str, Any]) -> list[Request]:
        """Random tokens, with end tokens ignored, so that each row does
        the same work.
        """
        from dllm_engine.params import DiffusionParams

        config = llm.model_config.hf_config
        rng = random.Random(self.seed)
        tokens = [
            token
            for token in range(llm.model_config.get_vocab_size())
            if token != config.mask_token_id
        ]
        params = DiffusionParams(**decoding | {"ignore_eos": True})
        return [(rng.choices(tokens, k=self.prompt), params) for _ in range(self.batch)]


def random_engine(model: str, **settings: Any) -> "LLM":
    """An engine of a named shape with random weights, without tokenizer; ``settings``
    are those of ``LLM``.
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
    """The values of each row, and its speed over that without a cache."""
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
