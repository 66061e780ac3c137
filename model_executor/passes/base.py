"""Layer passes: who runs the layers of a model over which rows.

A model's layers expose parts only. A layer pass owns the loop over them; it may drop
rows between layers (early skipping) or compute some parts for all rows and others for a
few (adaptive updates).
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.kernels.attention import (
    bidirectional_attention,
    reads_bounds_on_device,
)
from dllm_engine.kernels.paged_attention import paged_attention
from dllm_engine.model_executor.batch_tables import HeadTables, KVTables
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.step_batch import RowBounds, SplitRows, StepBatch
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics


class LayerPass:
    """Runs all layers in one forward pass."""

    results: Sequence[torch.Tensor] = ()
    """Tensors that the last pass left beside hidden states. A recorded pass gets a copy
    of what a replay leaves.
    """
    answers: Sequence[np.ndarray] = ()
    """Values of ``asked`` on the host."""
    chooses = False
    """True if layers choose rows to compute or to keep. A trace shows them of each
    step.
    """
    observes = False
    """True if ``observe`` must be called."""
    repeats = False
    """True if running the pass once more does the same work on the current tokens."""
    writes = True
    """True if the pass changes more than the tokens that its step fills."""
    follows = False
    """True if ``follow`` must be called between steps that run ahead."""
    graph_rows = 0
    """Rows of a recorded pass, if more than the batch has: rows of no request, which no
    attention reaches, follow.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        """A pass over the rows of a batch."""

    @classmethod
    def of(cls, batch: StepBatch, pages: PageMemory) -> "LayerPass":
        """The pass of a batch: of this class, or of another that suits its options."""
        return cls(batch, pages)

    @staticmethod
    def positions(plan: StepPlan, canvas: Canvas) -> np.ndarray:
        """The canvas positions of a plan's rows, ascending. They may
        depend on tokens.
        """
        return np.arange(*plan.span)

    @property
    def finished(self) -> tuple[torch.Tensor, Sequence[int]] | None:
        """After the pass, the rows that went through all layers, ``[num_rows]`` bool,
        and the number of each request's; None: all rows. Only finished rows predict a
        token."""
        return None

    def graph_layout(self) -> Hashable | None:
        """The host's numbers that shape the launches of a pass. Passes of one class,
        one layout and equal shapes of ``graph_inputs`` differ in the contents of these
        alone. None: the pass is launched."""
        return None

    def graph_inputs(self) -> list[torch.Tensor]:
        """Tensors that the pass reads on the device."""
        return []

    def __call__(
        self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases
    ) -> torch.Tensor:
        """Hidden states ``[num_rows, hidden_size]`` after the last layer, from the
        embeddings of the same rows.

        ``hidden`` belongs to the pass, which may write into it. A pass that computes
        every row in every layer differs from others in ``attend`` alone; one that does
        not has its own loop.
        """
        update = None  # what the layer before adds; the next norm does it
        for index, layer in enumerate(layers):
            q, k, v = layer.qkv(layer.attn_norm(hidden, update), phases)
            attended = layer.o_proj(self.attend(index, q, k, v))
            update = layer.mlp(layer.mlp_norm(hidden, attended))
        return hidden if update is None else hidden.add_(update)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention output ``[num_rows, num_heads, head_dim]`` of all rows, and what
        becomes of their keys and values.

        ``q`` ``[num_rows, num_heads, head_dim]``, ``k`` and ``v`` ``[num_rows,
        num_kv_heads, head_dim]``.
        """
        raise NotImplementedError

    def follow(self, masked: torch.Tensor) -> None:
        """Take in what the last step filled, before one more step. ``masked``:
        ``CanvasStore.masked``.
        """

    def observe(
        self, index: int, positions: torch.Tensor, statistics: TokenStatistics
    ) -> None:
        """Observe the predictions at masked positions of a request, before any of them
        is unmasked.
        """

    def asked(self) -> list[torch.Tensor]:
        """Tensors that the host reads after the pass, as ``answers``. They are copied
        together with the filled tokens, so that the host waits once."""
        return []

    def next_rows(self, index: int) -> np.ndarray | None:
        """Canvas positions that the next step of a request computes, ascending, if its
        plan leaves the choice to the pass (``positions``). Called after the step's
        tokens are in the canvas. The same on every rank."""
        return None

    def rows_computed(self, index: int, num_rows: int) -> int:
        """Rows that the pass computed for a request of ``num_rows``, as a mean over the
        layers, rounded up.
        """
        return num_rows

    def kv_slots(self, index: int) -> int | None:
        """Key slots that a request needs for good in the table that its layers share,
        on the rank that needs most; None unless this pass has settled it."""
        return None

    def record(self, index: int) -> dict[str, Any]:
        """Trace entries of the pass for a request, by their names in
        ``DiffusionFigures.trace``.
        """
        return {}


class DensePass(LayerPass):
    """A pass that neither reads nor writes pages: each sequence attends to itself, as
    far as its rows have no limits to all of it."""

    repeats = True
    writes = False

    def __init__(self, row_bounds: RowBounds, pages: object = None) -> None:
        self.row_bounds = row_bounds

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        return attend_alone(q, k, v, self.row_bounds)


def attend_alone(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: RowBounds
) -> torch.Tensor:
    """Attention of each request's rows over themselves."""
    if rows.limits is not None or (rows.is_padded and not reads_bounds_on_device()):
        bounds, limits, longest = rows.cu_seqlens, rows.limits, rows.max_seqlen
        return paged_attention(
            q, k, v, bounds, None, attend_fresh=True, limits=limits, max_seqlen=longest
        )
    return bidirectional_attention(q, k, v, rows.bounds, rows.cu_seqlens)


def attend_split(
    layer: int,
    tables: KVTables | HeadTables,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: SplitRows,
    *,
    attend_fresh: bool,
    alone: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each request's rows over what it has in pages, and with
    ``attend_fresh`` over its own rows. Requests that need no pages ``attend_alone``;
    ``alone`` is what comes out for them, where that is known."""
    n = rows.num_paged_rows
    if alone is None and n < q.shape[0]:
        alone = attend_alone(q[n:], k[n:], v[n:], rows.alone)
    if alone is not None and not n:
        return alone
    bounds, limits, longest = (
        rows.paged.cu_seqlens,
        rows.paged.limits,
        rows.paged.max_seqlen,
    )
    tokens, own = tables.paged_tokens(layer), (q[:n], k[:n], v[:n])
    paged = paged_attention(
        *own,
        bounds,
        tokens,
        attend_fresh=attend_fresh,
        limits=limits,
        max_seqlen=longest,
    )
    return paged if alone is None else torch.cat((paged, alone))
