"""Guided Diffusion as slow, plain PyTorch: every draft by a full forward pass, every
check by a fresh causal one.

Readings where the paper leaves room:

* The agreeing prefix is that of the drafted positions in order. A drafted token agrees
  if fewer than ``guide_top_k`` tokens have a higher logit in the guide's row; of tokens
  with the same logit the lower id ranks first.
* Correction replaces every selected token by the guide's argmax, which it computed with
  the uncorrected draft before it. That includes the token of
  ``guide_fallback="draft"``.
* The guide never predicts the mask token. Dream's block rule and schedules do not
  apply; its shift does.

With a guide of another tokenizer (``Texts``), which the paper does not spell out:

* A drafted token is read as all guide tokens that share a character with it. What has
  no text agrees never.
* Bytes that are no valid UTF-8 are shown as the replacement character, one per maximal
  malformed part.
* The guide's own token in its place: the guide's words from the drafted token's first
  byte on; of that text the longest token of the diffusion model that begins it. The
  drafted token itself if the guide agrees with all of it, if no text is left, or if the
  guide's word differs already before the drafted token's first byte.
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
"""Logits ``[len(ids), vocabulary]`` of a causal model: row i predicts token i + 1 from
tokens 0 to i.
"""


def rank(row: torch.Tensor, token: int) -> int:
    """How many tokens come before ``token`` in a row of logits."""
    return int((row > row[token]).sum() + (row[:token] == row[token]).sum())


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
        return max(
            rank(row, token) for row, token in zip(self.rows, self.read, strict=True)
        )


def judge_tokens(
    guide: Guide, text: list[int], window: list[int], mask: int
) -> list[Judged]:
    """By a guide of the same tokenizer; ``text`` is the canvas up to the window's last
    position, drafts in place.
    """
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
        shown = b""  # what it reads, where a special token takes a byte
        read, ends = (
            [],
            [0],
        )  # its tokens, and where each of them ends, from the second on
        characters: dict[
            int, tuple[int, int]
        ] = {}  # those that a canvas position has bytes of: first and last byte
        places: dict[
            int, int | None
        ] = {}  # of its first byte; inside a replaced character it is nowhere
        for special, run in groupby(
            range(len(text)), key=lambda i: text[i] in self.special
        ):
            if special:
                for i in run:
                    characters[i], places[i] = (len(shown), len(shown)), len(shown)
                    shown += b"\0"
                    read.append(self.special[text[i]])
                    ends.append(len(shown))
                continue
            start = len(shown)
            data = [
                (byte, i) for i in run for byte in self.spelled.get(text[i], b"\xff")
            ]
            while data:
                character, taken = _first_character(bytes(byte for byte, _ in data[:4]))
                for offset, (_, i) in enumerate(data[:taken]):
                    is_shown = offset == 0 or character != REPLACEMENT
                    places.setdefault(i, len(shown) + offset if is_shown else None)
                    first, _ = characters.get(i, (len(shown), 0))
                    characters[i] = first, len(shown) + len(character) - 1
                shown += character
                data = data[taken:]
            for token in self.encode(shown[start:].decode()):
                read.append(token)
                ends.append(ends[-1] + len(self.guide_spelled[token]))
            assert ends[-1] == len(shown)
        rows, judged = guide(read), []
        for i in window:
            first, last = characters[i]
            indices = [
                t for t in range(len(read)) if ends[t] <= last and first < ends[t + 1]
            ]
            tokens = [read[t] for t in indices]
            predicting = [rows[t - 1] for t in indices if t > 0]
            before = None if places[i] is None else shown[ends[indices[0]] : places[i]]
            judged.append(
                Judged(
                    tokens,
                    predicting,
                    self._answer(text[i], tokens, predicting, before),
                )
            )
        return judged

    def _answer(
        self,
        draft: int,
        tokens: list[int],
        rows: list[torch.Tensor],
        before: bytes | None,
    ) -> int:
        """``before``: what of the first of the guide's tokens lies before the draft."""
        if len(rows) < len(tokens):
            return draft
        said = b""
        for row, token in zip(rows, tokens, strict=True):
            own = int(row.argmax())
            if own != token:
                break
            said += self.guide_spelled.get(token, b"")
        else:
            return draft
        if own not in self.special.values():
            said += self.guide_spelled.get(own, b"\xff")
        elif said == b"" and before == b"":
            return next(a for a, b in self.special.items() if b == own)
        if before is None or not said.startswith(before):
            return draft
        rest = said[len(before) :]
        fitting = [
            token
            for token, spelled in self.spelled.items()
            if spelled and rest.startswith(spelled)
        ]
        return max(fitting, key=lambda token: len(self.spelled[token]), default=draft)


REPLACEMENT = "\ufffd".encode()


def _first_character(data: bytes) -> tuple[bytes, int]:
    """The first character of up to four bytes as it is shown, and how many of them it
    takes.
    """
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if error.start == 0:
            return REPLACEMENT, error.end
    character = data.decode(errors="ignore")[0].encode()
    return character, len(character)


def plain_guided(
    model: PlainModel,
    guide: Guide,
    prompt_ids: list[int],
    *,
    gen_length: int,
    block_length: int,
    speculation_length: int = 32,
    guide_top_k: int = 1,
    guide_threshold: float | None = None,
    guide_fallback: str = "guide",
    guide_correction: bool = False,
    texts: Texts | None = None,
    response_template: list[int | None] | None = None,
) -> Decoding:
    """Decode with a guide, which reads text if there are ``texts``."""
    run = Decoding(
        model, prompt_ids, gen_length, block_length, response_template=response_template
    )
    for _ in run.passes():
        window = run.masked(*run.window)[:speculation_length]
        predictions = model.predictions(run.canvas)[window]
        drafts = predictions.argmax(-1).tolist()
        text = run.canvas[: window[-1] + 1]
        for position, draft in zip(window, drafts, strict=True):
            text[position] = draft
        judged = (
            texts.judge(guide, text, window)
            if texts
            else judge_tokens(guide, text, window, model.mask)
        )

        agreed = next(
            (i for i, of_draft in enumerate(judged) if of_draft.rank >= guide_top_k),
            len(judged),
        )
        chosen = set(range(agreed))
        if guide_threshold is not None:
            for i, p in enumerate(predictions.softmax(-1).amax(-1).tolist()):
                run.decided(gap(p, guide_threshold))
                if p > guide_threshold:
                    chosen.add(i)
        guided = guide_correction or (not chosen and guide_fallback == "guide")
        chosen = chosen or {0}
        for i in chosen:
            run.canvas[window[i]] = judged[i].answer if guided else drafts[i]
        run.order.append(sorted(window[i] for i in chosen))
        assert model.mask not in [run.canvas[p] for p in run.order[-1]], (
            "the diffusion model drafts its mask token"
        )

        compared = set(range(min(agreed + 1, len(judged))))
        for i in compared:
            for row, token in zip(judged[i].rows, judged[i].read, strict=False):
                ordered = row.sort(descending=True).values.tolist()
                # The best one left out, or the last one let in.
                rival = (
                    ordered[guide_top_k]
                    if rank(row, token) < guide_top_k
                    else ordered[guide_top_k - 1]
                )
                run.decided(gap(float(row[token]), rival))
        # The guide is causal: a correction depends on all drafts before it.
        before = set(range(max(chosen))) if guide_correction else set()
        decisive = [predictions[i] for i in compared | chosen | before]
        for row in decisive + [row for i in chosen if guided for row in judged[i].rows]:
            run.decided(gap(*row.topk(2).values.tolist()))
    return run
