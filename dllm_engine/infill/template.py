"""Templates of text, which have given pieces and holes (docs/infill.md): their tokens,
and the texts that a response fills in.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from dllm_engine.lengths.holes import Hole
from dllm_engine.request_options.errors import InvalidRequestError

Piece = str | int | tuple[int, ...] | None
"""Given text, or a hole. The length of a hole is a number of tokens, one of several
numbers, or (None) open."""
_OTHER_HOLE = 4
"""Number of masks that stand for another hole whose length is not chosen yet."""


def parse_template(text: str) -> list[Piece]:
    """The pieces of a text in which ``[[n]]`` is a hole of n tokens, and ``[[]]`` an
    open hole.
    """
    pieces: list[Piece] = []
    for number, part in enumerate(re.split(r"\[\[(\d*)\]\]", text)):
        if number % 2:
            pieces.append(int(part) if part else None)
        elif part:
            pieces.append(part)
    return pieces


@dataclass(frozen=True)
class Template:
    """A template whose texts are tokens."""

    parts: tuple[list[int] | int | tuple[int, ...] | None, ...]
    """Given tokens, or a hole as in ``Piece``."""

    @property
    def open_holes(self) -> int:
        """Number of the holes whose lengths are to be chosen."""
        return sum(isinstance(part, tuple | None) for part in self.parts)

    @property
    def known_length(self) -> int:
        """Number of tokens without the open holes."""
        return len(self.filled([0] * self.open_holes))

    def budget(self, most: int, prompt_length: int, max_model_len: int) -> int:
        """Limit on the tokens of each hole that names no sizes: ``most``, or what fits
        behind the prompt.
        """
        sizes = [max(part) for part in self.parts if isinstance(part, tuple)]
        needed = prompt_length + self.known_length + sum(sizes)
        if needed > max_model_len:
            raise InvalidRequestError(
                f"prompt ({prompt_length} tokens), given texts and holes "
                f"({needed - prompt_length}) need a canvas of at least {needed}, "
                f"max_model_len is {max_model_len}; shorten one or raise max_model_len"
            )
        return min(most, (max_model_len - needed) // max(self.parts.count(None), 1))

    def choices(self, ranked: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Lengths of the open holes. ``ranked`` has those of each hole, the best first.
        The best of each hole, or of a single hole the best ``count``.
        """
        if len(ranked) == 1:
            return [[length] for length in ranked[0][:count]]
        return [[lengths[0] for lengths in ranked]]

    def hole_sizes(self, lengths: Sequence[int]) -> list[int]:
        """Number of tokens of all holes. ``lengths``: lengths of the open holes."""
        remaining = iter(lengths)
        return [
            part if isinstance(part, int) else next(remaining)
            for part in self.parts
            if not isinstance(part, list)
        ]

    def holes(
        self, prompt: Sequence[int], sizes: range, mask_token_id: int
    ) -> list[Hole]:
        """The open holes. A hole has one of ``sizes``, unless it names its own.

        Raises ``InvalidRequestError`` for a hole with nothing given behind it.
        """
        holes = []
        for place, part in enumerate(self.parts):
            if not isinstance(part, tuple | None):
                continue
            before, behind = (
                [
                    mask_token_id if token is None else token
                    for token in Template(parts).filled([_OTHER_HOLE] * len(parts))
                ]
                for parts in (self.parts[:place], self.parts[place + 1 :])
            )
            if all(token == mask_token_id for token in behind):
                raise InvalidRequestError(
                    "nothing is given behind the last hole, so that its length cannot "
                    "be chosen; give its number of tokens"
                )
            own_sizes = sizes if part is None else sorted(set(part))
            holes.append(Hole([*prompt, *before], behind, own_sizes))
        return holes

    def filled(self, lengths: Sequence[int]) -> list[int | None]:
        """Given tokens, and None for each token of a hole. ``lengths``: lengths of the
        open holes, or more.
        """
        remaining = iter(lengths)
        tokens: list[int | None] = []
        for part in self.parts:
            if isinstance(part, list):
                tokens += part
            else:
                tokens += [None] * (part if isinstance(part, int) else next(remaining))
        return tokens


def nothing(
    request_id: str,
    prompt: Any,
    params: SamplingParams,
    given: Sequence[int] = (),
    tokenizer: Any = None,
) -> RequestOutput:
    """The output of a request whose holes are all empty. ``given``: the given tokens to
    return.
    """
    logprobs = [
        {token: Logprob(0.0, rank=1, decoded_token=tokenizer.decode([token]))}
        for token in given
    ]
    completion = CompletionOutput(
        index=0,
        text=tokenizer.decode(given) if given else "",
        token_ids=[*given],
        cumulative_logprob=None if params.logprobs is None else 0.0,
        logprobs=None if params.logprobs is None else logprobs,
        finish_reason="stop",
    )
    tokens = list(prompt.get("prompt_token_ids", ()))
    return RequestOutput(
        request_id, prompt.get("prompt"), tokens, None, [completion], finished=True
    )


def tokenized(pieces: Sequence[Piece], tokenizer: Any, max_model_len: int) -> Template:
    """The template of these pieces. Raises ``InvalidRequestError`` for a hole without a
    token, a special token in a piece, a template without a hole, and pieces that exceed
    ``max_model_len``."""
    _check_pieces(pieces, tokenizer, max_model_len)
    special_tokens: set[int] = (
        set() if tokenizer is None else set(tokenizer.all_special_ids)
    )
    parts: list[list[int] | int | tuple[int, ...] | None] = []
    for number, piece in enumerate(pieces):
        if not isinstance(piece, str):
            parts.append(piece)
            continue
        tokens = tokenizer.encode(piece, add_special_tokens=False)
        if special := special_tokens.intersection(tokens):
            shown = tokenizer.decode([min(special)])
            raise InvalidRequestError(
                f"template[{number}] contains the special token {shown!r}; leave it out"
            )
        parts.append(tokens)
    return Template(tuple(parts))


def _smallest_sizes(pieces: Sequence[Piece]) -> Iterator[int]:
    """The fewest tokens of each hole."""
    for number, piece in enumerate(pieces):
        if piece is None or isinstance(piece, str):
            continue
        sizes = piece if isinstance(piece, tuple) else (piece,)
        if not sizes:
            raise InvalidRequestError(
                "a hole has no size; give one, or several to choose from"
            )
        for size in sizes:
            if isinstance(size, bool) or not isinstance(size, int):
                raise InvalidRequestError(
                    f"template[{number}]={piece!r} is neither text nor a hole's number "
                    f"of tokens"
                )
            least = 1 if isinstance(piece, int) else 0
            if size < least:
                raise InvalidRequestError(
                    f"template[{number}]={size}: a hole has {least} or more tokens"
                )
        yield min(sizes)


def _check_pieces(pieces: Sequence[Piece], tokenizer: Any, max_model_len: int) -> None:
    """Check pieces before a text is tokenized, so that invalid pieces are refused
    quickly.
    """
    check_length("template", pieces, max_model_len)
    num_masks = sum(_smallest_sizes(pieces))
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if len(texts) == len(pieces):
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
    before they are read. A text is JSON with the entries. Other types are refused
    later."""
    # A token id or null takes at most 16 characters with its separator.
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
    sizes: Sequence[int] | None = None,
) -> list[str]:
    """The text of each hole of a response; empty behind an end token. ``with_given``:
    with the given tokens in it. ``sizes``: tokens of each hole; None: a hole is what
    stands between given tokens.
    """
    if sizes is None:
        runs = groupby(template, key=lambda token: token is None)
        sizes = [len([*run]) for is_hole, run in runs if is_hole]
    returned = [given for given in template if with_given or given is None]
    pairs = zip(returned, token_ids, strict=False)
    tokens = iter([token for given, token in pairs if given is None])
    holes = ([*islice(tokens, size)] for size in sizes)
    return [tokenizer.decode(hole, skip_special_tokens=True) for hole in holes]
