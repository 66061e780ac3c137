"""Shared prompts, as slow, plain PyTorch.

The keys and values of a prompt's whole pages are those of the first request that
computed them, in its first pass. Every later pass, also of that request, reads them and
computes the rest. The first pass of a request also computes the first and the last
``anchor_tokens`` that it finds, rounded up to whole pages, for itself alone; later
passes read these. Decisions keep all of their prompts, and begin where the first one
that went on behind their whole pages has other tokens. When a request has ended, the
pages of its response are kept as the pass left them with which its last window began;
the first window begins with the pass that keeps the prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq

import torch

from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding

Content = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of some neighbouring tokens."""


@dataclass
class SharedPrompts:
    """Pages of an engine that shares prompts, by all tokens up to their ends."""

    page_size: int
    anchor_tokens: int = 0
    keeps_responses: bool = True
    update_step: int = 0
    """Step of a window in which it is kept what lies before."""
    num_passes: float = math.inf
    """Passes after which a request is aborted. It is decoded to its end; what is kept
    is what there was then.
    """
    by_token: bool = False
    """True for decisions."""
    pages: dict[tuple[int, ...], Content] = field(default_factory=dict)
    following: dict[tuple[int, ...], tuple[list[int], Content]] = field(
        default_factory=dict
    )
    """By whole pages of tokens: the next tokens, at most a page, and their content."""

    def find(self, text: list[int], most: int) -> int:
        """Tokens of the longest beginning of ``text`` in pages, at most ``most``."""
        num_tokens = 0
        while (
            num_tokens + self.page_size <= most
            and tuple(text[: num_tokens + self.page_size]) in self.pages
        ):
            num_tokens += self.page_size
        return num_tokens

    def keep(self, buffer: Buffer, text: list[int], num_tokens: int) -> None:
        for end in range(self.page_size, num_tokens + 1, self.page_size):
            content = content_of(buffer, slice(end - self.page_size, end))
            self.pages.setdefault(tuple(text[:end]), content)
        for start in range(self.page_size, num_tokens, self.page_size):
            page = slice(start, min(start + self.page_size, num_tokens))
            following = text[page], content_of(buffer, page)
            self.following.setdefault(tuple(text[:start]), following)

    def buffer(self, run: Decoding) -> "SharedBuffer":
        return SharedBuffer(run, self)

    def end(self, run: Decoding) -> None:
        if self.keeps_responses and not run.response_template and run.buffer:
            text = run.prompt + run.tokens
            run.buffer.k, run.buffer.v = run.buffer.in_order
            num_kept = min(run.buffer.in_order[0].shape[1], len(text))
            self.keep(run.buffer, text, num_kept)


class SharedBuffer(Buffer):
    """A buffer that begins with shared pages, which no pass computes."""

    def __init__(self, run: Decoding, shared: SharedPrompts) -> None:
        super().__init__(run)
        self.shared, size = shared, shared.page_size
        most = len(run.prompt) - run.model.is_dream
        self.num_sharable = most if shared.by_token else most // size * size
        anchors = -(-shared.anchor_tokens // size) * size
        found = shared.find(run.prompt, self.num_sharable)
        self.shared_rows = range(anchors, max(found - anchors, anchors))
        """Rows that passes leave out."""
        self.in_order = self.k[:, :0], self.v[:, :0]
        """What lies before the window, when it was last kept."""
        for start in self.shared_rows[::size]:
            self.put(start, shared.pages[tuple(run.prompt[: start + size])])
        before = tuple(run.prompt[:found])
        if shared.by_token and not anchors and before in shared.following:
            tokens, (k, v) = shared.following[before]
            own = run.prompt[found : self.num_sharable]
            alike = sum(takewhile(bool, map(eq, tokens, own)))
            self.put(found, (k[:, :alike], v[:, :alike]))
            self.shared_rows = range(found + alike)
        run.num_found = len(self.shared_rows)
        run.buffer = self

    def forward(self, rows: Sequence[int], *read: Sequence[int]) -> torch.Tensor:
        rows = [position for position in rows if position not in self.shared_rows]
        num_read = self.shared_rows.stop if self.shared_rows else 0
        keeps_prompt = num_read < self.num_sharable
        logits = super().forward(rows, *read)
        self.shared.keep(self, self.run.prompt, self.num_sharable)
        self.shared_rows = range(self.num_sharable)
        is_aborted = len(self.run.order) >= self.shared.num_passes
        is_due = keeps_prompt or self.run.step == self.shared.update_step
        if is_due and not is_aborted:
            self.in_order = content_of(self, slice(self.run.window[0]))
        return logits

    def put(self, start: int, content: Content) -> None:
        """Let ``content`` be that of the positions from ``start`` on."""
        k, v = content
        own = slice(start, start + k.shape[1])
        self.k[:, own], self.v[:, own] = k, v


def content_of(buffer: Buffer, positions: slice) -> Content:
    return buffer.k[:, positions].clone(), buffer.v[:, positions].clone()
