"""Scores: how many of a task's examples a model solves, and what that costs."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dllm_engine.demo.tasks import Example, exact_match, item_matches

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams

COLUMNS = ("TASK", "PROMPT TOKENS", "EXAMPLES", "EXACT", "ITEMS", "FORWARDS/TOKEN", "SECONDS")


@dataclass(frozen=True)
class TaskScore:
    """Results on one task. Rates are fractions."""

    task: str
    min_prompt_tokens: int
    max_prompt_tokens: int
    examples: int
    exact_match: float
    """Share of responses that are exactly the answer."""
    item_match: float
    """Share of the items asked for that are right."""
    tokens: int
    """Response tokens unmasked, to the end of each last block."""
    forwards_per_token: float
    computed_per_token: float
    """Rows fed to the model per response token."""
    seconds: float

    def row(self) -> tuple[str, ...]:
        return (
            self.task,
            f"{self.min_prompt_tokens}-{self.max_prompt_tokens}",
            str(self.examples),
            f"{self.exact_match:.1%}",
            f"{self.item_match:.1%}",
            f"{self.forwards_per_token:.2f}",
            f"{self.seconds:.1f}",
        )


def score_task(llm: "LLM", examples: list[Example], params: "DiffusionParams") -> TaskScore:
    """Answer the examples of one task, all at once."""
    start = time.perf_counter()
    if llm.has_chat_template:
        conversations = [[{"role": "user", "content": example.prompt}] for example in examples]
        outputs = llm.chat(conversations, params, use_tqdm=False)
    else:
        outputs = llm.generate([example.prompt for example in examples], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return score(examples, outputs, seconds)


def score(examples: list[Example], outputs: list[Any], seconds: float) -> TaskScore:
    """Compare vLLM's outputs with the examples of one task, in the same order."""
    texts = [output.outputs[0].text for output in outputs]
    figures = [output.outputs[0].diffusion for output in outputs]
    tokens = sum(f.tokens_unmasked for f in figures)
    lengths = [len(output.prompt_token_ids) for output in outputs]
    return TaskScore(
        task=examples[0].task,
        min_prompt_tokens=min(lengths),
        max_prompt_tokens=max(lengths),
        examples=len(examples),
        exact_match=sum(map(exact_match, texts, examples)) / len(examples),
        item_match=sum(map(item_matches, texts, examples)) / sum(len(example.items) for example in examples),
        tokens=tokens,
        forwards_per_token=sum(f.forward_passes for f in figures) / tokens,
        computed_per_token=sum(f.tokens_computed for f in figures) / tokens,
        seconds=seconds,
    )
