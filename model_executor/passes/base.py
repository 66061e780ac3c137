"""Layer passes, which run the layers of a model over rows.

A model's layers expose only parts. A layer pass owns the loop over them; it may drop
rows between layers (early skipping) or compute some parts for all rows and others for a
few (adaptive updates).
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeIs

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
"""Tensors that a pass returns beside hidden states, such as the rows that it chose."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)``: compute the attention output ``[num_rows, num_heads,
head_dim]`` of all rows, and write those keys and values to pages that the pass keeps.

``q`` ``[num_rows, num_heads, head_dim]``, ``k`` and ``v`` ``[num_rows, num_kv_heads,
head_dim]``.
"""


Observe = Callable[[int, Tensor, TokenStatistics], None]
"""``observe(index, positions, statistics)``: observe the predictions at masked
positions of a request, before any of them is unmasked."""


class Repeats(Enum):
    """How a pass can be used for the next step."""

    OTHER_WORK = "other work"
    """The next step needs another pass."""
    AFTER_FOLLOW = "after follow"
    """The pass runs again, once ``follow`` has taken in what the last step filled."""
    SAME_WORK = "same work"
    """The pass runs again."""
    ONLY_FILLS = "only fills"
    """The pass runs again. A step changes only the tokens that it fills, so it may also
    have nothing to do.
    """


@dataclass(frozen=True)
class GraphParts:
    """Description of a pass for recording as a CUDA graph. Passes of one class with
    equal layouts and equal shapes of inputs differ only in the contents of the inputs.
    """

    layout: Hashable
    """Numbers on the host that determine the launches of the pass."""
    inputs: list[Tensor]
    """Tensors that the pass reads on the device."""
    num_rows: int = 0
    """Number of rows of the recorded pass, if it is larger than the batch: padding rows
    follow, which belong to no request and which no row attends to."""


class LayerPass:
    """One forward pass through all layers."""

    repeats = Repeats.OTHER_WORK
    recorded = False
    """True for a pass that is recorded: it must not wait for the device."""
    observe: Observe | None = None
    """Callback for predictions at the candidates and at the ``observed`` positions;
    None: the pass observes no predictions.
    """

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        """A pass over the rows of a batch."""

    @classmethod
    def of(cls, batch: StepBatch, pages: PageMemory) -> "LayerPass":
        """Make the pass of a batch: an instance of this class, or of another class that
        suits the options.
        """
        return cls(batch, pages)

    @staticmethod
    def positions(plan: StepPlan, canvas: Canvas) -> np.ndarray:
        """Canvas positions of a plan's rows, ascending. They may depend on tokens."""
        return np.r_[: plan.num_anchored, slice(*plan.span)]

    @staticmethod
    def observed(plan: StepPlan) -> Span | None:
        """Span from the first candidate on whose masked positions are predicted for the
        pass. Positions beyond the candidates are not filled. None: only candidates are
        predicted.
        """
        return None

    def __call__(
        self, layers: Iterable[DecoderLayer], hidden: Tensor, phases: RotaryPhases
    ) -> tuple[Tensor, Results]:
        """Run the layers. Returns the hidden states ``[num_rows, hidden_size]`` after
        the last layer and the results of the pass. ``hidden``: embeddings of the same
        rows; the pass may overwrite them.
        """
        raise NotImplementedError

    def graph_parts(self) -> GraphParts | None:
        """Description of the pass for a CUDA graph; None: the pass is launched."""
        return None

    def finished(self, results: Results) -> tuple[Tensor, Sequence[int]] | None:
        """Rows that went through all layers, bool ``[num_rows]``, and the number of
        such rows per request; None: all rows. Only these rows predict a token."""
        return None

    def follow(self, masked: Tensor) -> None:
        """Update the pass for one more step, after the last step has filled positions.
        ``masked``: ``CanvasStore.masked``.
        """

    def tensors_to_read(self, results: Results) -> list[Tensor]:
        """Tensors that the host has to read after the pass. They are copied together
        with the filled tokens, so that the host waits once."""
        return []

    def take_read_tensors(
        self, index: int, results: Results, arrays: Sequence[np.ndarray]
    ) -> int | None:
        """Take the host copies of ``tensors_to_read`` for a request, whose canvas has the step's
        tokens already. Returns the final number of key slots that the request needs in
        the table that its layers share, on the rank that needs most; None if this pass
        does not decide it. The same on every rank."""
        return None

    def rows_computed(self, index: int, num_rows: int, results: Results) -> int:
        """Number of rows that the pass computed for a request with ``num_rows`` rows:
        the mean over the layers, rounded up.
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
    """Run layers that compute every row, with ``attend`` as attention. Returns the
    hidden states after the last layer. ``drafts``: as for ``DecoderLayer.o_proj``.
    """
    update = None  # output of the layer before, which the next norm adds
    for index, layer in enumerate(layers):
        q, k, v = layer.qkv(layer.attn_norm(hidden, update), phases)
        attended = layer.o_proj(attend(index, q, k, v), drafts)
        update = layer.mlp(layer.mlp_norm(hidden, attended))
    return hidden if update is None else hidden.add_(update)


class AttendingPass(LayerPass):
    """A pass that computes every row in every layer. Subclasses differ in ``attend``."""

    def __call__(
        self, layers: Iterable[DecoderLayer], hidden: Tensor, phases: RotaryPhases
    ) -> tuple[Tensor, Results]:
        return run_layers(layers, hidden, phases, self.attend), self.results()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Implements ``Attend``."""
        raise NotImplementedError

    def results(self) -> Results:
        """Results of the pass, once all layers have run."""
        return ()


def can_join(layer_pass: LayerPass) -> TypeIs[AttendingPass]:
    """Return True if a pass can be part of a ``JoinedPass``."""
    pass_class = type(layer_pass)
    return (
        issubclass(pass_class, AttendingPass)
        and pass_class.__call__ is AttendingPass.__call__
    )


class PassInput(NamedTuple):
    """Input of the model for the rows of a pass."""

    tokens: Tensor
    """``[num_rows]`` int64."""
    positions: Tensor
    """``[num_rows]`` int64."""
    layer_pass: AttendingPass


class JoinedPass(AttendingPass):
    """Several passes in one: their rows lie end to end and run through the layers
    together.
    """

    def __init__(self, passes: Sequence[AttendingPass], sizes: Sequence[int]) -> None:
        """``sizes``: number of rows of each pass."""
        self.passes = passes
        self.sizes = list(sizes)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(values.split(self.sizes) for values in (q, k, v)), strict=True)
        return torch.cat(
            [
                layer_pass.attend(layer, *part)
                for layer_pass, part in zip(self.passes, parts, strict=True)
            ]
        )


class DensePass(AttendingPass):
    """A pass that neither reads nor writes pages: each sequence attends to itself, to
    all of it or up to the limits of its rows."""

    repeats = Repeats.ONLY_FILLS

    def __init__(self, row_bounds: RowBounds, pages: object = None) -> None:
        self.row_bounds = row_bounds

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_alone(q, k, v, self.row_bounds)


def attend_alone(q: Tensor, k: Tensor, v: Tensor, rows: RowBounds) -> Tensor:
    """Attention of each request's rows to the rows of the request."""
    if rows.limits is not None or (rows.is_padded and not reads_bounds_on_device()):
        bounds, limits, longest = rows.cu_seqlens, rows.limits, rows.max_seqlen
        return paged_attention(
            q, k, v, bounds, None, attend_fresh=True, limits=limits, max_seqlen=longest
        )
    return bidirectional_attention(q, k, v, rows.bounds, rows.cu_seqlens)


class AttendedTables(Protocol):
    """Tables of the tokens in pages that rows attend to."""

    def paged_tokens(self, layer: int) -> PagedTokens: ...


def attend_paged(
    layer: int,
    tables: AttendedTables,
    qkv: Sequence[Tensor],
    rows: SplitRows,
    *,
    attend_fresh: bool,
) -> Tensor:
    """Attention of the rows of requests that need pages: to their tokens in pages, and
    with ``attend_fresh`` to their own rows. ``qkv``: queries, keys and values of all
    rows.
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
