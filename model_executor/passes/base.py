"""Layer passes: who runs the layers of a model over which rows.

A model's layers expose parts only. A layer pass owns the loop over them; it may drop
rows between layers (early skipping) or compute some parts for all rows and others for a
few (adaptive updates).
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.kernels.attention import (
    bidirectional_attention,
    reads_bounds_on_device,
)
from dllm_engine.kernels.paged_attention import PagedTokens, paged_attention
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.step_batch import RowBounds, SplitRows, StepBatch
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics

Results = Sequence[Tensor]
"""Tensors that a pass leaves beside hidden states, such as the rows that it chose."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)``: attention output ``[num_rows, num_heads, head_dim]`` of
all rows, and what becomes of their keys and values.

``q`` ``[num_rows, num_heads, head_dim]``, ``k`` and ``v`` ``[num_rows, num_kv_heads,
head_dim]``.
"""


Observe = Callable[[int, Tensor, TokenStatistics], None]
"""``observe(index, positions, statistics)``: observe the predictions at masked
positions of a request, before any of them is unmasked."""


class Repeats(Enum):
    """Use of a pass for the next step."""

    OTHER_WORK = "other work"
    """The next step needs another pass."""
    AFTER_FOLLOW = "after follow"
    """The pass runs again, once ``follow`` has taken in what the last step filled."""
    SAME_WORK = "same work"
    """The pass runs again."""
    ONLY_FILLS = "only fills"
    """The pass runs again. Nothing changes but the tokens that a step fills, so that a
    step may find nothing to do.
    """


@dataclass(frozen=True)
class GraphParts:
    """Description of a pass that is recorded as a CUDA graph. Passes of one class, one
    layout and equal shapes of inputs differ in the contents of the inputs alone.
    """

    layout: Hashable
    """The host's numbers that shape the launches of the pass."""
    inputs: list[Tensor]
    """Tensors that the pass reads on the device."""
    num_rows: int = 0
    """Rows of the recorded pass, if more than the batch has: rows of no request, which
    no attention reaches, follow."""


class LayerPass:
    """Runs all layers in one forward pass."""

    repeats = Repeats.OTHER_WORK
    recorded = False
    """True for a pass that is recorded: it must not wait for the device."""
    observe: Observe | None = None
    """None: the pass observes no predictions. Else it observes those of the candidates,
    and of ``observed``.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        """A pass over the rows of a batch."""

    @classmethod
    def of(cls, batch: StepBatch, pages: PageMemory) -> "LayerPass":
        """The pass of a batch: of this class, or of another that suits its options."""
        return cls(batch, pages)

    @staticmethod
    def positions(plan: StepPlan, canvas: Canvas) -> np.ndarray:
        """The canvas positions of a plan's rows, ascending. They may depend on tokens."""
        return np.r_[: plan.num_anchored, slice(*plan.span)]

    @staticmethod
    def observed(plan: StepPlan) -> Span | None:
        """Masked positions that are predicted for the pass, from the first candidate
        on. Those that are no candidates are not filled. None: there are none.
        """
        return None

    def __call__(
        self, layers: Iterable[DecoderLayer], hidden: Tensor, phases: RotaryPhases
    ) -> tuple[Tensor, Results]:
        """Hidden states ``[num_rows, hidden_size]`` after the last layer, from the
        embeddings of the same rows, and the results of the pass. ``hidden`` belongs to
        the pass, which may write into it.
        """
        raise NotImplementedError

    def graph_parts(self) -> GraphParts | None:
        """Description of the pass for a CUDA graph; None: the pass is launched."""
        return None

    def finished(self, results: Results) -> tuple[Tensor, Sequence[int]] | None:
        """The rows that went through all layers, ``[num_rows]`` bool, and the number of
        each request's; None: all rows. Only finished rows predict a token."""
        return None

    def follow(self, masked: Tensor) -> None:
        """Take in what the last step filled, before one more step. ``masked``:
        ``CanvasStore.masked``.
        """

    def asked(self, results: Results) -> list[Tensor]:
        """Tensors that the host reads after the pass. They are copied together with the
        filled tokens, so that the host waits once."""
        return []

    def take_answers(
        self, index: int, results: Results, answers: Sequence[np.ndarray]
    ) -> int | None:
        """Take in what the host has read of ``asked``, for a request whose canvas has
        the step's tokens. Returns the key slots that the request needs for good in the
        table that its layers share, on the rank that needs most; None where this pass
        does not tell. The same on every rank."""
        return None

    def rows_computed(self, index: int, num_rows: int, results: Results) -> int:
        """Rows that the pass computed for a request of ``num_rows``, as a mean over the
        layers, rounded up.
        """
        return num_rows

    def record(self, index: int, results: Results) -> dict[str, Any]:
        """Trace entries of the pass for a request, by their names in
        ``DiffusionFigures.trace``.
        """
        return {}


def run_layers(
    layers: Iterable[DecoderLayer],
    hidden: Tensor,
    phases: RotaryPhases,
    attend: Attend,
    drafts: Tensor | None = None,
) -> Tensor:
    """Hidden states after the last layer, of a pass that computes every row in every
    layer and differs from others in ``attend`` alone. ``drafts``: as of
    ``DecoderLayer.o_proj``.
    """
    update = None  # what the layer before adds; the next norm does it
    for index, layer in enumerate(layers):
        q, k, v = layer.qkv(layer.attn_norm(hidden, update), phases)
        attended = layer.o_proj(attend(index, q, k, v), drafts)
        update = layer.mlp(layer.mlp_norm(hidden, attended))
    return hidden if update is None else hidden.add_(update)


class DensePass(LayerPass):
    """A pass that neither reads nor writes pages: each sequence attends to itself, as
    far as its rows have no limits to all of it."""

    repeats = Repeats.ONLY_FILLS

    def __init__(self, row_bounds: RowBounds, pages: object = None) -> None:
        self.row_bounds = row_bounds

    def __call__(
        self, layers: Iterable[DecoderLayer], hidden: Tensor, phases: RotaryPhases
    ) -> tuple[Tensor, Results]:
        return run_layers(layers, hidden, phases, self.attend), ()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_alone(q, k, v, self.row_bounds)


def attend_alone(q: Tensor, k: Tensor, v: Tensor, rows: RowBounds) -> Tensor:
    """Attention of each request's rows over themselves."""
    if rows.limits is not None or (rows.is_padded and not reads_bounds_on_device()):
        bounds, limits, longest = rows.cu_seqlens, rows.limits, rows.max_seqlen
        return paged_attention(
            q, k, v, bounds, None, attend_fresh=True, limits=limits, max_seqlen=longest
        )
    return bidirectional_attention(q, k, v, rows.bounds, rows.cu_seqlens)


class AttendedTables(Protocol):
    """Tables of what rows attend to in pages."""

    def paged_tokens(self, layer: int) -> PagedTokens: ...


def attend_paged(
    layer: int,
    tables: AttendedTables,
    qkv: Sequence[Tensor],
    rows: SplitRows,
    *,
    attend_fresh: bool,
) -> Tensor:
    """Attention of the rows of requests that need pages over what they have there, and
    with ``attend_fresh`` over their own rows. ``qkv``: of all rows.
    """
    q, k, v = (values[: rows.num_paged_rows] for values in qkv)
    return paged_attention(
        q,
        k,
        v,
        rows.paged.cu_seqlens,
        tables.paged_tokens(layer),
        attend_fresh=attend_fresh,
        limits=rows.paged.limits,
        max_seqlen=rows.paged.max_seqlen,
    )


def attend_split(
    layer: int,
    tables: AttendedTables,
    qkv: Sequence[Tensor],
    rows: SplitRows,
    *,
    attend_fresh: bool,
) -> Tensor:
    """Attention of all rows: ``attend_paged``, and ``attend_alone`` for the requests
    that need no pages.
    """
    n = rows.num_paged_rows
    num_rows = len(qkv[0])
    if n == num_rows:
        return attend_paged(layer, tables, qkv, rows, attend_fresh=attend_fresh)
    q, k, v = (values[n:] for values in qkv)
    alone = attend_alone(q, k, v, rows.alone)
    if not n:
        return alone
    paged = attend_paged(layer, tables, qkv, rows, attend_fresh=attend_fresh)
    return torch.cat((paged, alone))
