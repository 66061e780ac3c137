"""Templates of text, given pieces and holes (docs/infill.md): their tokens, and what a
response fills in.
"""

import math
import re
from collections.abc import Sequence
from itertools import groupby, product
from typing import Any

from dllm_engine.request_options.errors import InvalidRequestError

Piece = str | int | tuple[int, ...]
"""Given text, or a hole of so many tokens; of several sizes the surest is kept."""
MOST_CANDIDATES = 64
"""Most combinations of the sizes of a template's holes."""


def parse_template(text: str) -> list[Piece]:
    """The pieces of a text in which ``[[n]]`` is a hole of n tokens."""
    pieces = [
        int(part) if number % 2 else part
        for number, part in enumerate(re.split(r"\[\[(\d+)\]\]", text))
    ]
    return [piece for piece in pieces if piece != ""]


def sized(pieces: Sequence[Piece]) -> list[list[str | int]]:
    """The template with one size for each hole, in every combination of their sizes."""
    choices = [piece if isinstance(piece, tuple) else (piece,) for piece in pieces]
    count = math.prod(map(len, choices))
    if not count:
        raise InvalidRequestError(
            "a hole has no size; give one, or several to choose from"
        )
    if count > MOST_CANDIDATES:
        raise InvalidRequestError(
            f"the holes have more than {MOST_CANDIDATES} combinations of sizes; give "
            f"fewer"
        )
    return [list(combination) for combination in product(*choices)]


def response_template(
    pieces: Sequence[str | int], tokenizer: Any, max_model_len: int
) -> list[int | None]:
    """Tokens of the given pieces, and None for each token of a hole. Raises
    ``InvalidRequestError`` for a hole of no token, a special token in a piece, where
    there is no hole, and where the pieces do not fit ``max_model_len``."""
    _check_pieces(pieces, tokenizer, max_model_len)
    special_tokens: set[int] = (
        set() if tokenizer is None else set(tokenizer.all_special_ids)
    )
    template: list[int | None] = []
    for number, piece in enumerate(pieces):
        if isinstance(piece, int):
            template += [None] * piece
            continue
        tokens = tokenizer.encode(piece, add_special_tokens=False)
        if special := special_tokens.intersection(tokens):
            shown = tokenizer.decode([min(special)])
            raise InvalidRequestError(
                f"template[{number}] contains the special token {shown!r}; leave it out"
            )
        template += tokens
    return template


def _check_pieces(
    pieces: Sequence[str | int], tokenizer: Any, max_model_len: int
) -> None:
    """Raise what is wrong before a text is tokenized: nothing takes long, whatever the
    pieces are.
    """
    check_length("template", pieces, max_model_len)
    for number, piece in enumerate(pieces):
        if isinstance(piece, bool) or not isinstance(piece, str | int):
            raise InvalidRequestError(
                f"template[{number}]={piece!r} is neither text nor a hole's number of "
                f"tokens"
            )
        if not isinstance(piece, str) and piece < 1:
            raise InvalidRequestError(
                f"template[{number}]={piece}: a hole has 1 or more tokens"
            )
    texts = [piece for piece in pieces if isinstance(piece, str)]
    num_masks = sum(piece for piece in pieces if isinstance(piece, int))
    if not num_masks:
        raise InvalidRequestError(
            "the template has no hole; give the number of tokens to fill in between "
            "its texts"
        )
    if texts and tokenizer is None:
        raise InvalidRequestError(
            "the engine has no tokenizer (skip_tokenizer_init=True); give token ids as "
            "response_template"
        )
    num_characters = sum(map(len, texts))
    needed = num_masks + (
        -(-num_characters // tokenizer.max_chars_per_token) if texts else 0
    )
    if needed > max_model_len:
        raise InvalidRequestError(
            f"holes of {num_masks} tokens and given texts of {num_characters} "
            f"characters need a canvas of at least {needed}, max_model_len is "
            f"{max_model_len}; shorten them or raise max_model_len"
        )


def check_length(name: str, given: Any, max_model_len: int) -> None:
    """Raise ``InvalidRequestError`` for more entries than a canvas has positions,
    before anybody looks at them; a text is JSON that holds them. Other types are
    refused later."""
    # A token id or null takes at most 16 characters, with what separates it from the
    # next.
    unit, most = (
        ("characters", 16 * max_model_len)
        if isinstance(given, str)
        else ("entries", max_model_len)
    )
    if isinstance(given, str | list | tuple) and len(given) > most:
        raise InvalidRequestError(
            f"{name} has {len(given)} {unit}, of which max_model_len={max_model_len} "
            f"allows {most}; shorten it"
        )


def filled_in(
    token_ids: Sequence[int],
    template: Sequence[int | None],
    tokenizer: Any,
    *,
    with_given: bool,
) -> list[str]:
    """The text of each hole of a response, ``with_given`` tokens in it or without;
    empty behind an end token.
    """
    tokens = iter(token_ids)
    texts = []
    for is_hole, run in groupby(template, key=lambda token: token is None):
        own = (
            [token for _, token in zip(run, tokens, strict=False)]
            if is_hole or with_given
            else []
        )
        if is_hole:
            texts.append(tokenizer.decode(own, skip_special_tokens=True))
    return texts
