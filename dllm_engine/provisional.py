"""Streaming by denoising step (``stream_granularity="step"``): the running blocks
before their text is final. ``RequestOutput.outputs[i].provisional`` has the whole
blocks, HTTP events only the changes."""

from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class ProvisionalBlock:
    """The running block after a denoising step; several running blocks as one. Lists
    have an entry per position.
    """

    block: int
    """Index of the first running block, from 0."""
    num_blocks: int
    """Number of blocks of the response. After an end token the last ones may not run.
    """
    gen_length: int
    """Number of positions of the response."""
    block_length: int
    """Number of positions of a block. The last block may have fewer."""
    first_block_length: int
    """Number of positions of the first block, which is shorter if it begins in the
    prompt.
    """
    start: int
    """Start of the first running block in the response, in tokens."""
    step: int
    """Denoising steps since the last running block joined."""
    forward_pass: int
    """Forward passes of the response so far."""
    sent: int
    """Number of response tokens whose text is final and sent: all before ``start``, and
    complete blocks after it.
    """
    token_ids: list[int]
    """The mask token's id where masked."""
    masked: list[bool]
    confidences: list[float | None]
    """Probability of the position's token as its unmasking policy saw it: in the step
    that committed it, or for a masked position in the latest step that predicted it.
    None: not predicted yet."""
    pieces: list[str | None] | None = None
    """Text of each token, including end tokens; None for a masked position. The field
    is None without a tokenizer.
    """
    special: list[bool] | None = None
    """True for special tokens, which the text leaves out; the field is None without a
    tokenizer.
    """

    @property
    def window(self) -> tuple[int, int]:
        """Start of the positions and their number."""
        return self.start, len(self.token_ids)

    @property
    def text(self) -> str | None:
        """Text of the blocks without special tokens, with ``░`` for each masked
        position; None without a tokenizer.
        """
        return self._text_from(0)

    @property
    def unsent_text(self) -> str | None:
        """The part of ``text`` that is not sent yet."""
        return self._text_from(self.sent - self.start)

    def _text_from(self, first: int) -> str | None:
        if self.pieces is None or self.special is None:
            return None
        return "".join(
            "░" if piece is None else "" if special else piece
            for piece, special in zip(
                self.pieces[first:], self.special[first:], strict=True
            )
        )


class BlockReader:
    """Reader of the running blocks of one response. ``tokenizer`` is None if the engine
    has none.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._special = (
            None if tokenizer is None else frozenset(tokenizer.all_special_ids)
        )
        # Cached, because each step reads the same tokens again.
        self._decode = cache(lambda tokens: tokenizer.decode(list(tokens)))

    def read(self, message: dict[str, Any]) -> ProvisionalBlock:
        """The running blocks in a message about a step."""
        if self._special is None:
            return ProvisionalBlock(**message)
        marks = zip(message["token_ids"], message["masked"], strict=True)
        tokens = [None if masked else token for token, masked in marks]
        special = [token in self._special for token in tokens]
        return ProvisionalBlock(**message, pieces=self._pieces(tokens), special=special)

    def _pieces(self, tokens: list[int | None]) -> list[str | None]:
        """The text of each token; None for a mask (None). If several neighbouring
        tokens form a character, the last of them gets the character and the others get
        an empty string."""
        pieces: list[str | None] = []
        pending: tuple[int, ...] = ()
        for token in tokens:
            if token is None:
                pieces.append(None)
                pending = ()
                continue
            pending = (*pending, token)
            text = self._decode(pending)
            # A character of UTF-8 has at most four bytes, so more than four tokens
            # cannot complete it.
            is_part = text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < 4
            pieces.append("" if is_part else text)
            pending = pending if is_part else ()
        return pieces


_PROGRESS = ("block", "step", "forward_pass", "sent")
_SIZES = ("num_blocks", "gen_length", "block_length", "first_block_length", "start")
"""Fields of a block that each event has, and those that the first one has."""


class BlockChanges:
    """Changes of the running blocks since the last event to an HTTP client. A slow
    client may miss steps.
    """

    def __init__(self) -> None:
        self._window: tuple[int, int] | None = None
        self._known: dict[int, tuple[int, str | None]] = {}
        """Token and piece of each position that is not masked."""
        self._percents: dict[int, int] = {}
        """Probability of the best token at each masked position."""

    def to(self, block: ProvisionalBlock) -> dict[str, Any]:
        """The changes from the last sent state to ``block`` in HTTP form. Positions
        count from the response's start.
        """
        form = {name: getattr(block, name) for name in _PROGRESS}
        if block.window != self._window:
            self._window, self._known, self._percents = block.window, {}, {}
            form |= {name: getattr(block, name) for name in _SIZES}
            form["length"] = len(block.token_ids)
        return form | self._changed_tokens(block) | self._changed_guesses(block)

    def _changed_tokens(self, block: ProvisionalBlock) -> dict[str, Any]:
        length = len(block.token_ids)
        tokens = zip(block.token_ids, block.pieces or [None] * length, strict=True)
        now = {i: token for i, token in enumerate(tokens) if not block.masked[i]}
        changed = [i for i in range(length) if now.get(i) != self._known.get(i)]
        self._known = now
        form: dict[str, Any] = {
            "positions": [block.start + i for i in changed],
            "token_ids": [block.token_ids[i] for i in changed],
            "confidences": [
                c and round(c, 4) for c in (block.confidences[i] for i in changed)
            ],
        }
        if block.pieces is not None and block.special is not None:
            form["pieces"] = [block.pieces[i] for i in changed]
            form["special"] = [block.start + i for i in changed if block.special[i]]
        return form

    def _changed_guesses(self, block: ProvisionalBlock) -> dict[str, Any]:
        """The probabilities that have changed by at least one percent point."""
        guesses = {
            i: 100 * c
            for i, c in enumerate(block.confidences)
            if block.masked[i] and c is not None
        }
        changed = {
            i: round(percent)
            for i, percent in guesses.items()
            if abs(percent - self._percents.get(i, float("inf"))) >= 1
        }
        self._percents |= changed
        return {
            "guess_positions": [block.start + i for i in changed],
            "guess_percents": [*changed.values()],
        }
