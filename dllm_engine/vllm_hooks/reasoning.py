"""Parsers of answers that know if the prompt has ended reasoning, even if the markers
are not single tokens.

vLLM checks the prompt only for streams. It would take every other answer for reasoning.
"""

from collections.abc import Sequence
from typing import Any

from vllm.parser.abstract_parser import Parser

from dllm_engine.structured_output.prompt_reasoning import ends_reasoning
from dllm_engine.vllm_hooks.patch import Original


class ReadsPrompt(Parser):
    """Mixin for a server's parser of answers."""

    _prompt_ends_reasoning = False

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        """Return True if reasoning has ended. ``input_ids`` is the prompt: every route
        calls this before it parses the answer.
        """
        assert self.reasoning_parser is not None
        self._prompt_ends_reasoning = ends_reasoning(
            input_ids, self.reasoning_parser, self.model_tokenizer
        )
        return self._prompt_ends_reasoning or super().is_reasoning_end(input_ids)

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """Note whether the prompt ends reasoning. For an answer that is not streamed,
        vLLM passes the prompt but does not call ``is_reasoning_end``.
        """
        super().set_prompt_token_ids(prompt_token_ids)
        self.is_reasoning_end(list(prompt_token_ids))

    def extract_reasoning(
        self, model_output: str, request: Any
    ) -> tuple[str | None, str | None]:
        """Reasoning and content of an answer. The whole answer is content if the prompt
        has ended reasoning.
        """
        if self._prompt_ends_reasoning:
            return None, model_output
        return super().extract_reasoning(model_output, request)

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Number of reasoning tokens of an answer; 0 if the prompt has ended reasoning."""
        if self._prompt_ends_reasoning:
            return 0
        return super().count_reasoning_tokens(token_ids)


def parser_that_reads_prompts(
    get_parser: Original, cls: Any, *args: Any, **kwargs: Any
) -> type[Parser] | None:
    """vLLM's parser class for a server, extended to read the prompt."""
    parser = get_parser(cls, *args, **kwargs)
    if parser is None or parser.reasoning_parser_cls is None:
        return parser
    return type(parser.__name__, (ReadsPrompt, parser), {})
