"""Lets vLLM's parsers of answers see reasoning that the prompt has ended, also where
the markers are no single tokens.

vLLM asks about the prompt for streams only. Other answers would all be taken for
reasoning.
"""

from collections.abc import Sequence
from typing import Any

from dllm_engine.structured_output.prompt_reasoning import ends_reasoning
from dllm_engine.vllm_hooks.patch import Original

_ENDED = "dllm_engine_reasoning_ended"


def is_ended_by_prompt(
    is_reasoning_end: Original, self: Any, input_ids: list[int]
) -> bool:
    """``input_ids`` are the prompt: every route asks about it before it parses the
    answer.
    """
    parser = self.reasoning_parser
    ended = parser is not None and ends_reasoning(
        input_ids, parser, self.model_tokenizer
    )
    vars(self)[_ENDED] = ended
    return ended or is_reasoning_end(self, input_ids)


def read_prompt(
    set_prompt_token_ids: Original, self: Any, prompt_token_ids: Sequence[int]
) -> None:
    """vLLM gives a parser the prompt of an answer that is not streamed, and asks
    nothing about it.
    """
    set_prompt_token_ids(self, prompt_token_ids)
    self.is_reasoning_end(list(prompt_token_ids))


def extract_after_prompt(
    extract_reasoning: Original, self: Any, model_output: str, request: Any
) -> tuple[str | None, str | None]:
    """All of an answer is content where the prompt has ended the reasoning."""
    if vars(self).get(_ENDED):
        return None, model_output
    return extract_reasoning(self, model_output, request)


def count_after_prompt(
    count_reasoning_tokens: Original, self: Any, token_ids: Sequence[int]
) -> int:
    """No token of an answer is reasoning where the prompt has ended it."""
    return 0 if vars(self).get(_ENDED) else count_reasoning_tokens(self, token_ids)
