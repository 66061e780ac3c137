"""The structured start: initial weights that roughly find a token's context in the
prompt and copy from there.

The residual stream is cut into slots of equal width, one dimension that is the same for
every token and, where there are mask tokens, one that marks them. Slot 0 holds the
token itself. Head h of the first layer looks h + 1 positions back (the constant
dimension and the RoPE phase make the attention peak there) and writes that token into
slot h + 1. Heads of later layers compare some of these context slots between query and
key, in the RoPE dimensions that turn slowest, and copy a token from the position they
find into the output slot. The output head starts as a copy of the embedding that reads
the output slot. Training changes all of it; without this start recall takes far longer
to appear.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .network import D_MODEL, HEAD_DIM, DemoModel, rope_frequencies
from .samples import MASK, VOCAB_SIZE

CONTEXT = 4
"""Tokens back that the first layer writes beside each token, one per head."""
EMBEDDING_NORM = 5.0
"""Scale of the residual stream, large next to one step of the optimizers: smaller ones
wreck the start.
"""


@dataclass(frozen=True)
class CopyHead:
    """What a head of a later layer does at first: attend where slots agree, copy one
    slot from there to the output.

    ``compare`` lists pairs (slot of the query, slot of the key) that should hold the
    same token.
    """

    compare: tuple[tuple[int, int], ...]
    copied: int = 0


@dataclass(frozen=True)
class Circuit:
    """The start of one model."""

    slot_width: int
    output_slot: int
    later_heads: tuple[tuple[CopyHead, ...], ...]
    """Per layer after the first."""
    marks_masks: bool
    """True: heads keep away from mask tokens, whose slot 0 is empty."""

    @property
    def constant_dim(self) -> int:
        return (max(CONTEXT, self.output_slot) + 1) * self.slot_width

    @property
    def mask_dim(self) -> int:
        return self.constant_dim + 1

    @torch.no_grad()
    def initialise(self, model: DemoModel) -> None:
        """Set the weights of ``model`` to this start."""
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.01)
        blocks: list[Any] = list(model.blocks)
        for block in blocks:
            block.ff_proj.weight.normal_(std=D_MODEL**-0.5)
            block.up_proj.weight.normal_(std=D_MODEL**-0.5)
            block.ff_out.weight.zero_()

        embedding = F.normalize(torch.randn(VOCAB_SIZE, self.slot_width), dim=-1)
        if self.marks_masks:
            embedding[MASK] = 0.0
            model.wte.weight[MASK, self.mask_dim] = EMBEDDING_NORM
        model.wte.weight[:, self._slot(0)] = EMBEDDING_NORM * embedding
        model.wte.weight[:, self.constant_dim] = EMBEDDING_NORM
        model.ff_out.weight[:, self._slot(self.output_slot)] = 2.0 * embedding

        first, *later = blocks
        for head in range(CONTEXT):
            self._look_back(first, head, head + 1)
            self._copy_slot(first, head, 0, head + 1, gain=0.35)
        for block, heads in zip(later, self.later_heads, strict=True):
            for head, plan in enumerate(heads):
                self._match_slots(block, head, plan.compare)
                self._copy_slot(block, head, plan.copied, self.output_slot, gain=0.3)

    def _slot(self, index: int) -> slice:
        return slice(index * self.slot_width, (index + 1) * self.slot_width)

    def _look_back(self, block: Any, head: int, distance: int) -> None:
        """Make a head attend ``distance`` positions back, with the six RoPE pairs that
        turn fastest.
        """
        strength, dim = 0.9, self.constant_dim
        start, half = head * HEAD_DIM, HEAD_DIM // 2
        q, k = block.q_proj.weight, block.k_proj.weight
        for pair, frequency in enumerate(rope_frequencies()[:6].tolist(), start):
            q[pair, dim] = strength
            k[pair, dim] = strength * math.cos(distance * frequency)
            k[half + pair, dim] = strength * math.sin(distance * frequency)

    def _match_slots(
        self, block: Any, head: int, compare: tuple[tuple[int, int], ...]
    ) -> None:
        """Make a head attend where the given slots of query and key hold the same
        tokens, and not to masks.
        """
        gain = 2.5
        q, k = block.q_proj.weight, block.k_proj.weight
        start, half = head * HEAD_DIM, HEAD_DIM // 2
        slow = [
            pair + part
            for pair in range(start + half // 2, start + half)
            for part in (0, half)
        ]
        if self.marks_masks:
            last = slow.pop()
            q[last, self.constant_dim] = gain
            k[last, self.mask_dim] = -gain
        for query_slot, key_slot in compare:
            projection = torch.empty(len(slow), self.slot_width)
            nn.init.orthogonal_(projection)
            projection = gain / len(compare) ** 0.5 * projection
            q[slow, self._slot(query_slot)] = projection
            k[slow, self._slot(key_slot)] = projection

    def _copy_slot(
        self, block: Any, head: int, source: int, target: int, gain: float
    ) -> None:
        """Make a head write slot ``source`` of the attended position into slot
        ``target``.
        """
        start = head * HEAD_DIM
        rows = slice(start, start + self.slot_width)
        copy = gain * torch.eye(self.slot_width)
        block.v_proj.weight[rows, self._slot(source)] = copy
        block.attn_out.weight[self._slot(target), rows] = EMBEDDING_NORM * copy


def same_context(*slots: int) -> CopyHead:
    """Find the place with the same tokens before it at these distances, and copy what
    stands there.
    """
    return CopyHead(tuple((slot, slot) for slot in slots))


PREDECESSOR = CopyHead(compare=((1, 0),), copied=1)
"""Find the token that stands before the query, and copy the one before it: one step of
reversing a list.
"""
DEMO_CIRCUIT = Circuit(
    slot_width=24,
    output_slot=0,
    later_heads=(
        (PREDECESSOR, same_context(2), same_context(3), same_context(1, 2)),
        (PREDECESSOR, same_context(2, 3), same_context(3, 4), same_context(1, 2, 3, 4)),
        (same_context(1), same_context(2), same_context(2, 3), same_context(3, 4)),
    ),
    marks_masks=True,
)
FOLLOWING = tuple(
    CopyHead(tuple((back, back + 1) for back in range(length)))
    for length in range(1, 5)
)
"""Find where the last one to four tokens stood before, and copy what came next."""
PRECEDING = CopyHead(((0, 1),), copied=2)
"""Find where the last token stood before, and copy what came before it there: one step
of reversing a list.
"""
NEXT_ASKED = CopyHead(((0, 1), (4, 2)))
"""After "Ida=07,": find "Ida," and copy what comes next."""
SEPARATOR = CopyHead(((3, 1),))
"""After "Ida=07": find "Ida" and copy what comes next, a comma or the end of the
question.
"""
GUIDE_CIRCUIT = Circuit(
    slot_width=21,
    output_slot=CONTEXT + 1,  # a slot of its own: slot 0 is never empty here
    later_heads=(
        (FOLLOWING[0], FOLLOWING[1], PRECEDING, NEXT_ASKED),
        (FOLLOWING[2], FOLLOWING[3], PRECEDING, SEPARATOR),
    ),
    marks_masks=False,
)
