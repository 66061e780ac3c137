"""The positions of a request's canvas."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dllm_engine.families import Attention, BlockOrigin


class Span(NamedTuple):
    """Canvas positions ``start`` … ``stop - 1``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Blocks(NamedTuple):
    """Blocks ``first`` … ``stop - 1`` of a response."""

    first: int
    stop: int


FIRST_BLOCK = Blocks(0, 1)


@dataclass(frozen=True)
class CanvasLayout:
    """Prompt, response and blocks of a canvas: the positions of each block, the rows
    that a step may see, and the given tokens.
    """

    prompt_length: int
    gen_length: int
    block_length: int
    attention: Attention = "full"
    """``block_causal``: attention by blocks of ``attended_length``. The first block of
    the response begins behind the prompt."""
    block_origin: BlockOrigin = "canvas"
    whole_blocks: bool = True
    """With attention by blocks: True if the canvas ends with a whole block, and
    ``Schedule.block_steps`` counts the steps of a whole block, even if a part of it is
    in the prompt."""
    shifts_logits: bool = False
    """True if position ``p`` is predicted by row ``p - 1`` instead of its own row."""
    seeds_blocks: bool = False
    """With attention by blocks: True if the row before a block predicts the block's
    first position, before the rest of the block."""
    round_length: int | None = None
    """The most tokens that a round of self-speculation decides. Blocks are single
    tokens, each predicted by the row before it. A round drafts all of its blocks but
    the last, and then verifies them. 1: no drafts (autoregressive). None: no rounds."""
    attention_block: int | None = None
    """Length of attention blocks, if the blocks that are denoised one after the other
    are parts of them; None: both are the same."""
    suffix_blocks: int | None = None
    template: tuple[int | None, ...] = ()
    """The response before its first step: given tokens, and None for each mask. Empty:
    all masks.
    """
    return_given: bool = True

    @property
    def response_span(self) -> Span:
        return Span(self.prompt_length, self.prompt_length + self.gen_length)

    @cached_property
    def canvas_length(self) -> int:
        """End of the response, or of its last block. Positions between the two are
        decoded, but never sent.
        """
        stop = self.response_span.stop
        if not self.fills_blocks:
            return stop
        return self.block_start(stop - 1) + self.attended_length

    @property
    def is_block_causal(self) -> bool:
        return self.attention != "full"

    @property
    def attended_length(self) -> int:
        """Length of the blocks that attention goes by."""
        return self.attention_block or self.block_length

    @property
    def rows_at_once(self) -> int:
        """The most rows that a step must compute together."""
        return self.round_length or self.attended_length

    @property
    def has_drafts(self) -> bool:
        return self.round_length is not None and self.round_length > 1

    @property
    def fills_blocks(self) -> bool:
        return self.is_block_causal and self.whole_blocks

    @property
    def lead(self) -> int:
        """Number of positions that the first block of the canvas lacks."""
        if self.block_origin == "canvas":
            return 0
        return -self.prompt_length % self.attended_length

    def block_start(self, position: int) -> int:
        """First canvas position of the attention block of ``position``; below 0 if the
        first block is short.
        """
        return position - (position + self.lead) % self.attended_length

    def final_before(self, position: int) -> int:
        """End of the positions whose keys and values are final if all tokens before
        ``position`` are known.
        """
        if self.attention != "block_causal":
            return position
        return self.block_start(position)

    def final_stop(self, position: int) -> int:
        """End of the positions that keys and values of a finished ``position`` depend
        on. With full attention they depend on all positions, but requests that share
        prompts ignore later positions.
        """
        if self.attention != "block_causal":
            return position + 1
        return self.block_start(position) + self.attended_length

    @cached_property
    def blocks_start(self) -> int:
        """First canvas position of the response's first block; it may lie in the
        prompt.
        """
        if not self.is_block_causal:
            return self.prompt_length
        return self.prompt_length - (self.prompt_length + self.lead) % self.block_length

    @property
    def canvas_span(self) -> Span:
        return Span(0, self.canvas_length)

    def visible(self, window: Span) -> Span:
        """Canvas positions that are computed with ``window``, without blocks that are
        too far behind it or that attention does not reach.
        """
        if self.is_block_causal:
            return Span(0, self.from_block_start(window).stop)
        if self.suffix_blocks is None:
            return self.canvas_span
        stop = window.stop + self.suffix_blocks * self.block_length
        return Span(0, min(stop, self.canvas_length))

    @cached_property
    def num_blocks(self) -> int:
        return -(-(self.response_span.stop - self.blocks_start) // self.block_length)

    def block_span(self, block: int) -> Span:
        """Canvas positions of a block behind the prompt. The first and the last block
        may be shorter.
        """
        start = self.blocks_start + block * self.block_length
        return Span(
            max(start, self.prompt_length),
            min(start + self.block_length, self.canvas_length),
        )

    def span_of(self, blocks: Blocks) -> Span:
        """Canvas positions of neighbouring blocks."""
        last = self.block_span(blocks.stop - 1)
        return Span(self.block_span(blocks.first).start, last.stop)

    def from_block_start(self, window: Span) -> Span:
        """Extend ``window`` to whole attention blocks. In a round of self-speculation:
        the last verified token and all drafts behind it.
        """
        if self.round_length is not None:
            return Span(window.start - 1, window.stop - 1)
        stop = self.block_start(window.stop - 1) + self.attended_length
        return Span(self.block_start(window.start), min(stop, self.canvas_length))

    def predicting_span(self, blocks: Blocks) -> Span:
        start, stop = self.span_of(blocks)
        return Span(max(start - self.shifts_logits, 0), stop - self.shifts_logits)

    @property
    def response_template(self) -> tuple[int | None, ...]:
        """The response before its first step, with None for each mask."""
        return self.template or (None,) * self.gen_length

    def is_given(self, position: int) -> bool:
        """Return True if a canvas position of the response holds a given token."""
        return (
            bool(self.template)
            and self.template[position - self.prompt_length] is not None
        )

    @cached_property
    def last_given(self) -> int:
        """The last canvas position with a given token. Masks before it cannot end the
        response.
        """
        given = (i for i, token in enumerate(self.template) if token is not None)
        return self.prompt_length + max(given, default=-1)

    @cached_property
    def masks_per_block(self) -> tuple[int, ...]:
        behind = self.canvas_length - self.response_span.stop
        masked = [token is None for token in self.response_template] + [True] * behind
        spans = (self.block_span(block) for block in range(self.num_blocks))
        before = self.prompt_length
        return tuple(
            sum(masked[start - before : stop - before]) for start, stop in spans
        )

    def place_of_sent(self, number: int) -> int:
        """Canvas position after the first ``number`` sent tokens of a response."""
        sent = [
            i
            for i, token in enumerate(self.response_template)
            if self.return_given or token is None
        ]
        return self.prompt_length + (sent[number - 1] + 1 if number else 0)

    @property
    def num_masks(self) -> int:
        return sum(self.masks_per_block)

    @property
    def num_sent(self) -> int:
        """Number of tokens that are sent of a response without an end token."""
        return self.gen_length if self.return_given else self.num_masks
