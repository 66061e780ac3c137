"""Templates of text: given pieces and holes, how they become tokens, and which text was filled into which hole.

Pieces are tokenized one by one, and so is what is filled in. Where a piece begins or ends inside of what the tokenizer
would make one token, the model sees other tokens than in its training. Nothing is stripped.
"""

import re
from collections.abc import Sequence
from itertools import groupby, product
from typing import Any

from dllm_engine.scheduler.options.request_options import InvalidRequestError

Piece = str | int | tuple[int, ...]
"""Given text, or a hole of so many tokens; of several sizes the surest is kept."""
MOST_CANDIDATES = 64
"""Most combinations of the sizes of a template's holes."""
LONGEST_HOLE = 1 << 20
"""Tokens; more than any model's context."""
_HOLE = re.compile(r"\[\[(\d+)\]\]")


def parse_template(text: str) -> list[Piece]:
    """The pieces of a text in which ``[[n]]`` is a hole of n tokens."""
    pieces = [int(part) if number % 2 else part for number, part in enumerate(_HOLE.split(text))]
    return [piece for piece in pieces if piece != ""]


def sized(pieces: Sequence[Piece]) -> list[list[str | int]]:
    """The template with one size for each hole, in every combination of their sizes."""
    choices = [piece if isinstance(piece, tuple) else (piece,) for piece in pieces]
    found: list[list[str | int]] = []
    for combination in product(*choices):
        found.append(list(combination))
        if len(found) > MOST_CANDIDATES:
            raise InvalidRequestError(f"the holes have more than {MOST_CANDIDATES} combinations of sizes; give fewer")
    if not found:
        raise InvalidRequestError("a hole has no size; give one, or several to choose from")
    return found


def response_template(pieces: Sequence[str | int], tokenizer: Any) -> list[int | None]:
    """Tokens of the given pieces, and None for each token of a hole.

    Raises ``InvalidRequestError`` for a hole of no token, a special token in a piece, and where there is no hole.
    """
    template: list[int | None] = []
    for number, piece in enumerate(pieces):
        if isinstance(piece, bool) or not isinstance(piece, str | int):
            raise InvalidRequestError(f"template[{number}]={piece!r} is neither text nor a hole's number of tokens")
        if isinstance(piece, str):
            template += _tokens(piece, number, tokenizer)
        elif not 1 <= piece <= LONGEST_HOLE:
            raise InvalidRequestError(f"template[{number}]={piece}: a hole has 1 … {LONGEST_HOLE} tokens")
        else:
            template += [None] * piece
    if None not in template:
        raise InvalidRequestError("the template has no hole; give the number of tokens to fill in between its texts")
    return template


def _tokens(text: str, number: int, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        raise InvalidRequestError(
            "the engine has no tokenizer (skip_tokenizer_init=True); give token ids as response_template"
        )
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    special = set(tokenizer.all_special_ids).intersection(tokens)
    if special:
        shown = tokenizer.decode([min(special)])
        raise InvalidRequestError(f"template[{number}] contains the special token {shown!r}; leave it out")
    return tokens


def filled_in(
    token_ids: Sequence[int], template: Sequence[int | None], tokenizer: Any, *, with_given: bool
) -> list[str]:
    """The text of each hole of a response; holes behind an end token are empty.

    Args:
        token_ids: the response.
        with_given: whether it contains the given tokens too.
    """
    tokens = iter(token_ids)
    texts = []
    for is_hole, run in groupby(template, key=lambda token: token is None):
        own = [token for _, token in zip(run, tokens, strict=False)] if is_hole or with_given else []
        if is_hole:
            texts.append(tokenizer.decode(own, skip_special_tokens=True))
    return texts
