"""Lets vLLM's parsers of answers see reasoning that the prompt has ended, also where
the markers are no single tokens.

vLLM asks about the prompt for streams only. Other answers would all be taken for
reasoning.
"""

from collections.abc import Sequence
from typing import Any

from vllm.parser.abstract_parser import Parser

from dllm_engine.structured_output.prompt_reasoning import ends_reasoning
from dllm_engine.vllm_hooks.patch import Original


class ReadsPrompt(Parser):
    """Mixin for the parser that a server has for its answers."""

    _prompt_ends_reasoning = False

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        """``input_ids`` are the prompt: every route asks about it before it parses the
        answer.
        """
        assert self.reasoning_parser is not None
        self._prompt_ends_reasoning = ends_reasoning(
            input_ids, self.reasoning_parser, self.model_tokenizer
        )
        return self._prompt_ends_reasoning or super().is_reasoning_end(input_ids)

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """vLLM gives a parser the prompt of an answer that is not streamed, and asks
        nothing about it.
        """
        super().set_prompt_token_ids(prompt_token_ids)
        self.is_reasoning_end(list(prompt_token_ids))

    def extract_reasoning(
        self, model_output: str, request: Any
    ) -> tuple[str | None, str | None]:
        """Reasoning and content of an answer. All of it is content where the prompt has
        ended the reasoning.
        """
        if self._prompt_ends_reasoning:
            return None, model_output
        return super().extract_reasoning(model_output, request)

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """No token of an answer is reasoning where the prompt has ended it."""
        if self._prompt_ends_reasoning:
            return 0
        return super().count_reasoning_tokens(token_ids)


def parser_that_reads_prompts(
    get_parser: Original, cls: Any, *args: Any, **kwargs: Any
) -> type[Parser] | None:
    """vLLM's class of parsers for a server, which reads the prompt as well."""
    parser = get_parser(cls, *args, **kwargs)
    if parser is None or parser.reasoning_parser_cls is None:
        return parser
    return type(parser.__name__, (ReadsPrompt, parser), {})
