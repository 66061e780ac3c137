"""Detection of reasoning that has ended in the prompt: by a prefilled turn of the
assistant, or by a template that switches thinking off.
"""

from collections.abc import Sequence
from typing import Any


def ends_reasoning(
    prompt_token_ids: Sequence[int], reasoning_parser: Any, tokenizer: Any
) -> bool:
    """Return True if the last marker in the open turn of a prompt ends reasoning.

    vLLM's parsers look for markers that are single tokens. Many tokenizers spell them
    with several.
    """
    start = reasoning_parser.reasoning_start_str
    end = reasoning_parser.reasoning_end_str
    if not end:
        return False
    text = tokenizer.decode(
        _open_turn(prompt_token_ids, tokenizer, {start, end}), skip_special_tokens=False
    )
    last_start = text.rfind(start) if start else -1
    return text.rfind(end) > last_start


def _open_turn(
    prompt_token_ids: Sequence[int], tokenizer: Any, markers: set[str | None]
) -> list[int]:
    """The tokens behind the last special token. Special tokens separate turns, unless
    they are markers.
    """
    vocabulary = tokenizer.get_vocab()
    separators = set(tokenizer.all_special_ids) - {
        vocabulary.get(marker) for marker in markers if marker
    }
    for position in reversed(range(len(prompt_token_ids))):
        if prompt_token_ids[position] in separators:
            return list(prompt_token_ids[position + 1 :])
    return list(prompt_token_ids)
