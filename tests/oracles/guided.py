"""Guided Diffusion as slow, plain PyTorch: every draft by a full forward pass, every check by a fresh causal one.

Readings where the paper leaves room:

* The window is the next ``speculation_length`` masked positions, leftmost first, and never leaves the current block:
  the first one that holds a mask. Decoded positions between them do not count.
* The guide sees the canvas up to the window's last position: decoded tokens where there are any, the draft elsewhere.
  Nothing masked is left of the window, so this is one contiguous text. Position j is judged by the guide's row j - 1.
* The agreeing prefix is that of the drafted positions in order, up to the first that disagrees. Positions which a
  confidence threshold decoded earlier are skipped: they neither extend nor end it.
* A drafted token agrees if fewer than ``top_k`` tokens have a higher logit in the guide's row; of tokens with the same
  logit the lower id ranks first, as in an argmax.
* With ``confidence_threshold`` the window's positions whose draft has a probability strictly above it are selected too.
  The fallback is taken only if nothing at all is selected, so it never competes with a confident draft.
* The fallback unmasks the window's first position, with the guide's argmax ("guide") or the drafted token ("draft").
* Correction replaces every selected token by the guide's argmax, which it computed with the uncorrected draft before
  it. That includes the token of ``fallback="draft"``.
* The guide never predicts the mask token: it could not be told from a position that is still open.
* Dream's block rule and schedules do not apply; its shift does. The prompt is not empty (the guide needs a row before
  the first response token).

With a guide of another tokenizer (``Texts``), which the paper does not spell out:

* The guide reads the text of the canvas in its own tokens. A drafted token is read as all guide tokens that share a
  character with it, also those that begin in decoded text before it or that reach into text behind it. It agrees if
  each of them is among the guide's ``top_k`` best. What has no text agrees never.
* Bytes that are no valid UTF-8 are shown as the replacement character, one per maximal malformed part.
* The guide's own token in its place: the guide's words from the drafted token's first byte on, which are those shown as
  far as they are the guide's argmax, and the argmax where it is another; of that text the longest token of the
  diffusion model that begins it. The drafted token itself if the guide agrees with all of it, if no text is left, or if
  the guide's word differs already before the drafted token's first byte.
* Special tokens stand for special tokens: ``Texts.special`` says for which.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from tests.oracles.decoding import Decoding, gap
from tests.oracles.models import PlainModel

Guide = Callable[[list[int]], torch.Tensor]
"""Logits ``[len(ids), vocabulary]`` of a causal model: row i predicts token i + 1 from tokens 0 to i."""


def rank(row: torch.Tensor, token: int) -> int:
    """How many tokens come before ``token`` in a row of logits."""
    return int((row > row[token]).sum() + (row[:token] == row[token]).sum())


def agreeing_prefix(ranks: list[float], top_k: int) -> int:
    """How many drafts, from the first on, the guide has among its ``top_k`` best."""
    for count, of_draft in enumerate(ranks):
        if of_draft >= top_k:
            return count
    return len(ranks)


def select(
    drafts: list[int],
    probabilities: list[float],
    ranks: list[float],
    guided: list[int],
    *,
    top_k: int = 1,
    confidence_threshold: float | None = None,
    fallback: str = "guide",
    correction: bool = False,
) -> dict[int, int]:
    """The tokens that one step unmasks, by index in the window; ``ranks`` of the drafts, ``guided`` in their place."""
    chosen = {i: drafts[i] for i in range(agreeing_prefix(ranks, top_k))}
    if confidence_threshold is not None:
        chosen |= {i: drafts[i] for i in range(len(drafts)) if probabilities[i] > confidence_threshold}
    if not chosen:
        chosen = {0: guided[0] if fallback == "guide" else drafts[0]}
    return {i: guided[i] for i in chosen} if correction else chosen


class Judged(NamedTuple):
    """A drafted token before the guide."""

    read: list[int]
    """The guide's tokens for it."""
    rows: list[torch.Tensor]
    """The logits that predict each of them."""
    answer: int
    """What the guide says in its place, in the diffusion model's tokens."""

    @property
    def rank(self) -> float:
        if not self.read or len(self.rows) < len(self.read):
            return math.inf
        return max(rank(row, token) for row, token in zip(self.rows, self.read, strict=True))


def judge_tokens(guide: Guide, text: list[int], window: list[int], mask: int) -> list[Judged]:
    """By a guide of the same tokenizer; ``text`` is the canvas up to the window's last position, drafts in place."""
    rows = guide(text).clone()
    if mask < rows.shape[1]:
        rows[:, mask] = -math.inf
    return [Judged([text[i]], [rows[i - 1]], int(rows[i - 1].argmax())) for i in window]


@dataclass
class Texts:
    """How the two tokenizers of a pair spell."""

    spelled: dict[int, bytes]
    """Tokens of the diffusion model; any other one is a malformed byte."""
    encode: Callable[[str], list[int]]
    """Text in the guide's tokens."""
    guide_spelled: dict[int, bytes]
    special: dict[int, int]
    """Guide's special token for one of the diffusion model's."""

    def judge(self, guide: Guide, text: list[int], window: list[int]) -> list[Judged]:
        """As ``judge_tokens``, for a guide that reads text."""
        read: list[int] = []  # the guide's tokens
        owners: list[set[int]] = []  # of each of them, the canvas positions that share a character with it
        before: dict[int, list[bytes]] = {}  # of a canvas position, what of the first of its tokens lies before it
        for special, run in groupby(range(len(text)), key=lambda i: text[i] in self.special):
            if special:
                for i in run:
                    read.append(self.special[text[i]])
                    owners.append({i})
                    before[i] = [b""]
                continue
            data = [(byte, i) for i in run for byte in self.spelled.get(text[i], b"\xff")]
            shown, owner_of_byte, starts = b"", [], {}
            while data:
                character, taken = _first_character(bytes(byte for byte, _ in data[:4]))
                for offset, (_, i) in enumerate(data[:taken]):
                    # The place of a byte inside a replaced character is nowhere.
                    place = len(shown) + offset if character != "\ufffd".encode() or offset == 0 else None
                    starts.setdefault(i, place)
                owner_of_byte += [{i for _, i in data[:taken]}] * len(character)
                shown += character
                data = data[taken:]
            done = 0
            for token in self.encode(shown.decode()):
                stop = done + len(self.guide_spelled[token])
                of_token = set.union(*owner_of_byte[done:stop])
                for i in of_token - before.keys():
                    place = starts[i]
                    before[i] = [] if place is None else [shown[done:place]]
                read.append(token)
                owners.append(of_token)
                done = stop
            assert done == len(shown)
        rows = guide(read)
        return [
            self._judged(text[i], [t for t in range(len(read)) if i in owners[t]], read, rows, before[i])
            for i in window
        ]

    def _judged(
        self, draft: int, indices: list[int], read: list[int], rows: torch.Tensor, before: list[bytes]
    ) -> Judged:
        predicting = [rows[t - 1] for t in indices if t > 0]
        tokens = [read[t] for t in indices]
        if len(predicting) < len(tokens):
            return Judged(tokens, predicting, draft)
        said = b""
        for row, token in zip(predicting, tokens, strict=True):
            own = int(row.argmax())
            if own == token:
                said += self.guide_spelled.get(token, b"")
                continue
            if own in self.special.values():
                if said == b"" and before == [b""]:
                    return Judged(tokens, predicting, next(a for a, b in self.special.items() if b == own))
            else:
                said += self.guide_spelled.get(own, b"\xff")
            break
        else:
            return Judged(tokens, predicting, draft)
        if before and said.startswith(before[0]):
            rest = said[len(before[0]) :]
            fitting = [token for token, spelled in self.spelled.items() if spelled and rest.startswith(spelled)]
            if fitting:
                return Judged(tokens, predicting, max(fitting, key=lambda token: len(self.spelled[token])))
        return Judged(tokens, predicting, draft)


def _first_character(data: bytes) -> tuple[bytes, int]:
    """The first character of up to four bytes as it is shown, and how many of them it takes."""
    try:
        character = data.decode()[0].encode()
        return character, len(character)
    except UnicodeDecodeError as error:
        if error.start:
            character = data[: error.start].decode()[0].encode()
            return character, len(character)
        return "\ufffd".encode(), error.end


def plain_guided(
    model: PlainModel,
    guide: Guide,
    prompt_ids: list[int],
    *,
    gen_length: int,
    block_length: int | None = None,
    speculation_length: int = 32,
    top_k: int = 1,
    confidence_threshold: float | None = None,
    fallback: str = "guide",
    correction: bool = False,
    texts: Texts | None = None,
    response_template: list[int | None] | None = None,
) -> Decoding:
    """Decode with a guide; without ``block_length`` the response is one block; with ``texts`` the guide reads text."""
    run = Decoding(model, prompt_ids, gen_length, block_length or gen_length, response_template=response_template)
    for _ in run.passes():
        window = run.masked(*run.window)[:speculation_length]
        predictions = model.predictions(run.canvas)[window]
        drafts = [int(row.argmax()) for row in predictions]
        probabilities = [float(row.softmax(-1)[draft]) for row, draft in zip(predictions, drafts, strict=True)]
        text = run.canvas[: window[-1] + 1]
        for position, draft in zip(window, drafts, strict=True):
            text[position] = draft
        judged = texts.judge(guide, text, window) if texts else judge_tokens(guide, text, window, model.mask)

        ranks, answers = ([getattr(of_draft, name) for of_draft in judged] for name in ("rank", "answer"))
        asked = {"confidence_threshold": confidence_threshold, "fallback": fallback, "correction": correction}
        chosen = select(drafts, probabilities, ranks, answers, top_k=top_k, **asked)
        assert model.mask not in chosen.values(), "the diffusion model drafts its mask token"
        for i, token in chosen.items():
            run.canvas[window[i]] = token
        run.order.append(sorted(window[i] for i in chosen))
        run.decided(_token_margin(predictions, judged, set(chosen), top_k, fallback, correction))
        if confidence_threshold is not None:
            run.decided(min(_gap(probability, confidence_threshold) for probability in probabilities))
    return run


def _token_margin(
    predictions: torch.Tensor, judged: list[Judged], chosen: set[int], top_k: int, fallback: str, correction: bool
) -> float:
    """How close the closest choice of a token was, of those that this step's outcome depends on."""
    gaps = []
    prefix = agreeing_prefix([of_draft.rank for of_draft in judged], top_k)
    compared = set(range(min(prefix + 1, len(judged))))
    for i in compared:
        for row, token in zip(judged[i].rows, judged[i].read, strict=False):
            ordered = row.sort(descending=True).values.tolist()
            # The best one left out, or the last one let in.
            rival = ordered[top_k] if rank(row, token) < top_k else ordered[top_k - 1]
            gaps.append(_gap(float(row[token]), rival))
    # The guide is causal: a correction depends on all drafts before it.
    for i in compared | chosen | (set(range(max(chosen))) if correction else set()):
        gaps.append(_gap(*predictions[i].topk(2).values.tolist()))
    if correction or (fallback == "guide" and prefix == 0):
        for i in chosen:
            gaps += [_gap(*row.topk(2).values.tolist()) for row in judged[i].rows]
    return min(gaps)


def _gap(a: float, b: float) -> float:
    return gap(a, b, floor=1e-12) if math.isfinite(a) and math.isfinite(b) else math.inf
