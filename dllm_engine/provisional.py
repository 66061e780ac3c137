"""Streaming by denoising step: the running block as it is after each step, before its text is final.

A request asks with ``stream_granularity="step"``. The model runner reports what a step changed in the block, the
scheduler sends it with an output that has no new tokens, and ``vllm_hooks`` puts the block together and hands it on:
whole as ``RequestOutput.outputs[i].provisional``, to HTTP clients what changed.
"""

from dataclasses import dataclass
from typing import Any

from dllm_engine.inspection.record import pieces_of

MASK_MARK = "░"
"""Stands for a masked position in the text of a block."""


@dataclass(frozen=True)
class ProvisionalBlock:
    """The running block after a denoising step. Lists have an entry per position of the block."""

    block: int
    """Number of the block, from 0."""
    num_blocks: int
    """Blocks of the response; an end token may leave the last ones out."""
    gen_length: int
    """Positions of the response."""
    start: int
    """Where in the response the block starts, in tokens."""
    step: int
    """Denoising steps of this block so far."""
    forward_pass: int
    """Forward passes of the response so far."""
    token_ids: list[int]
    """The mask token's id where masked."""
    masked: list[bool]
    confidences: list[float | None]
    """Probability of the position's token as its unmasking policy saw it: at the step that committed it; where masked,
    of the token that the last step would have put there. None where no step has predicted one."""
    pieces: list[str | None] | None = None
    """The text of each token, end tokens too; None where masked. None as a whole without a tokenizer."""
    special: list[bool] | None = None
    """Whether the token is an end token or another special token, which the text leaves out; None without a
    tokenizer."""

    @property
    def text(self) -> str | None:
        """The block's text without special tokens, ``░`` for each masked position; None without a tokenizer."""
        if self.pieces is None or self.special is None:
            return None
        return "".join(
            MASK_MARK if piece is None else "" if special else piece
            for piece, special in zip(self.pieces, self.special, strict=True)
        )


class BlockReader:
    """Puts the running blocks of one response together from what each step changed. It must see every message."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer``: None where the engine has none."""
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids) if tokenizer is not None else frozenset()
        self._decoded: dict[tuple[int, ...], str] = {}
        self._block: int | None = None
        self._token_ids: list[int] = []
        self._masked: list[bool] = []
        self._confidences: list[float | None] = []

    def read(self, message: dict[str, Any]) -> ProvisionalBlock:
        """The block after the step that the message is of."""
        message = dict(message)
        length, mask = message.pop("length"), message.pop("mask_token_id")
        names = ("positions", "token_ids", "confidences", "guesses")
        positions, tokens, confidences, guesses = (message.pop(name) for name in names)
        if message["block"] != self._block:
            self._block = message["block"]
            self._token_ids, self._masked, self._confidences = [mask] * length, [True] * length, [None] * length
        for position, token, confidence in zip(positions, tokens, confidences, strict=True):
            self._token_ids[position], self._masked[position] = token, False
            self._confidences[position] = confidence
        still_masked = (position for position, is_masked in enumerate(self._masked) if is_masked)
        for position, guess in zip(still_masked, guesses, strict=True):
            self._confidences[position] = guess
        texts: dict[str, Any] = {}
        if self._tokenizer is not None:
            unmasked = zip(self._token_ids, self._masked, strict=True)
            special = [token in self._special and not is_masked for token, is_masked in unmasked]
            texts = {"pieces": self._pieces(), "special": special}
        return ProvisionalBlock(
            **message,
            token_ids=list(self._token_ids),
            masked=list(self._masked),
            confidences=list(self._confidences),
            **texts,
        )

    def _pieces(self) -> list[str | None]:
        """The text of each token; tokens that make one character together only do so without a mask between them."""
        pieces: list[str | None] = []
        run: list[int] = []
        for token, is_masked in zip(self._token_ids, self._masked, strict=True):
            if is_masked:
                pieces += [*pieces_of(run, self._decode), None]
                run = []
            else:
                run.append(token)
        return pieces + pieces_of(run, self._decode)

    def _decode(self, tokens: list[int]) -> str:
        """Every step reads the same tokens again, so each is decoded once."""
        key = tuple(tokens)
        if key not in self._decoded:
            self._decoded[key] = self._tokenizer.decode(tokens)
        return self._decoded[key]


class BlockChanges:
    """What an HTTP client must be told so that its picture of one response's blocks is that after the last step.

    It counts from what this client was sent, so that steps may be left out for one that reads slowly.
    """

    def __init__(self) -> None:
        self._block: int | None = None
        self._known: list[tuple[int, str | None] | None] = []
        self._percents: list[int | None] = []

    def to(self, block: ProvisionalBlock) -> dict[str, Any]:
        """The HTTP form of the way from what was sent last to ``block``. Positions count from the response's start."""
        form: dict[str, Any] = {"block": block.block, "step": block.step, "forward_pass": block.forward_pass}
        length = len(block.token_ids)
        if block.block != self._block:
            self._block = block.block
            self._known, self._percents = [None] * length, [None] * length
            form |= {"num_blocks": block.num_blocks, "gen_length": block.gen_length}
            form |= {"start": block.start, "length": length}
        pieces = block.pieces or [None] * length
        now = [
            None if masked else pair
            for masked, pair in zip(block.masked, zip(block.token_ids, pieces, strict=True), strict=True)
        ]
        changed = [i for i in range(length) if now[i] != self._known[i]]
        self._known = now
        form["positions"] = [block.start + i for i in changed]
        form["token_ids"] = [block.token_ids[i] for i in changed]
        form["confidences"] = [_rounded(block.confidences[i]) for i in changed]
        if block.pieces is not None and block.special is not None:
            form["pieces"] = [block.pieces[i] for i in changed]
            form["special"] = [block.start + i for i in changed if block.special[i]]
        guessed = [i for i in range(length) if block.masked[i] and self._differs(i, block.confidences[i])]
        for i in guessed:
            self._percents[i] = round(100 * (block.confidences[i] or 0))
        form["guess_positions"] = [block.start + i for i in guessed]
        form["guess_percents"] = [self._percents[i] for i in guessed]
        return form

    def _differs(self, i: int, confidence: float | None) -> bool:
        """Whether a guess moved by a whole percent."""
        known = self._percents[i]
        return confidence is not None and (known is None or abs(100 * confidence - known) >= 1)


def _rounded(confidence: float | None) -> float | None:
    return None if confidence is None else round(confidence, 4)
