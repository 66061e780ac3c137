"""Page tables of all requests of a batch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.page_layout import PageKind
from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.kernels.paged_attention import PagedTokens
from dllm_engine.kernels.pages import feature_rows
from dllm_engine.model_executor.page_memory import PageMemory, PageView
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.transfer import on_device

ALL_LAYERS = slice(None)
WIDTH_UNIT = 8


def padded_width(num_pages: int) -> int:
    """Width of a batch's tables with at most ``num_pages`` pages. There are few widths,
    because a recorded step has tables of one width.
    """
    return -(-num_pages // WIDTH_UNIT) * WIDTH_UNIT


class BatchTables:
    """Tables of one kind, or of a kind per request, stacked over the requests of a
    batch.
    """

    def __init__(self, batch: StepBatch, kind: str | Sequence[str]) -> None:
        kinds = [kind] * len(batch.canvases) if isinstance(kind, str) else kind
        none = torch.empty(0, 0, dtype=torch.int32, device=batch.device)
        tables = [
            canvas.page_tables.get(kind, none)
            for canvas, kind in zip(batch.canvases, kinds, strict=True)
        ]
        num_layers, widest = (
            max(sizes) for sizes in zip(*(table.shape for table in tables), strict=True)
        )
        shape = num_layers, padded_width(max(widest, 1))
        missing = [
            (0, shape[1] - table.shape[1], 0, shape[0] - table.shape[0])
            for table in tables
        ]
        padded = [
            F.pad(table, by) if any(by) else table
            for table, by in zip(tables, missing, strict=True)
        ]
        self.tables = torch.stack(padded, dim=1)
        """``[num_layers, num_requests, most pages]``"""
        self.num_pages = [table.shape[1] for table in tables]
        """Pages of each request in a layer."""

    def slots(
        self,
        layer: int | slice,
        requests: Tensor,
        items: Tensor,
        per_page: int,
    ) -> Tensor:
        """Physical places ``page · per_page + offset`` of ``items`` ``[n]`` in the
        tables of ``requests`` ``[n]``: int64 ``[n]``, or for a slice of the layers
        ``[num_layers, n]``; −1 for an item below 0."""
        pages = self.tables[layer, requests, items.clamp(min=0) // per_page].long()
        return torch.where(items < 0, -1, pages * per_page + items % per_page)


class FeatureTables(BatchTables):
    """Rows of features in pages, one for each position of a span of each canvas."""

    def __init__(
        self, batch: StepBatch, pages: PageMemory, spans: list[Span], width: int
    ) -> None:
        """``width``: numbers per row."""
        super().__init__(batch, PageKind.FEATURES)
        self.requests = batch.requests
        self.rows = feature_rows(pages.memory, width)
        self.items = on_device(batch.places_in(spans), batch.device)
        """Index of each batch row in the span of its request; negative outside."""

    def row_slots(self) -> Tensor:
        """Row slots ``[num_layers, num_rows]``; −1 outside the spans."""
        return self.slots(ALL_LAYERS, self.requests, self.items, self.rows.shape[1])

    def graph_inputs(self) -> list[Tensor]:
        return [self.requests, self.items, self.tables]


class KVTables:
    """The keys and values in pages that requests attend to, in every layer;
    token-major.
    """

    def __init__(
        self,
        pages: PageView,
        tables: Tensor,
        head_len: Tensor,
        max_head_len: int,
        first_read: Tensor | None = None,
    ) -> None:
        """``tables``: int32 ``[num_layers, num_requests, most pages]``; ``head_len``:
        number of tokens that each request attends to, contiguous int32
        ``[num_requests]``, at most ``max_head_len``; ``first_read``: index in the table
        of the first of these tokens; None: 0."""
        heads = pages.num_kv_heads
        num_requests = head_len.shape[0]
        device = head_len.device
        head_start = (
            torch.arange(heads, dtype=torch.int32, device=device)
            .expand(num_requests, -1)
            .contiguous()
        )
        if first_read is not None:
            head_start += heads * first_read[:, None]
        token_stride = torch.full(
            (num_requests,), heads, dtype=torch.int32, device=device
        )
        self.pages = pages
        self.tables = tables
        self.token_lens = head_len
        self.head_len = head_len[:, None].expand(-1, heads).contiguous()
        """``[num_requests, num_kv_heads]``"""
        places = head_start, token_stride, self.head_len
        self.layers = [
            PagedTokens(
                pages.keys, pages.values, table, *places, max_head_len, self.token_lens
            )
            for table in tables.unbind()
        ]

    def set_lengths(self, head_len: Tensor) -> None:
        """Set the number of tokens that each request attends to, in place. Requests
        beyond the length of ``head_len`` attend to no tokens: pages in their tables may
        belong to other requests by now."""
        num_requests = head_len.shape[0]
        self.token_lens[:num_requests] = head_len
        self.token_lens[num_requests:].zero_()
        self.head_len.copy_(self.token_lens[:, None])

    def paged_tokens(self, layer: int) -> PagedTokens:
        return self.layers[layer]


class TokenTables(BatchTables, KVTables):
    """Keys and values of a batch's requests. Token p of a table belongs to canvas
    position p.
    """

    def __init__(
        self,
        batch: StepBatch,
        pages: PageView,
        kind: str | Sequence[str] = PageKind.KV,
        head_len: list[int] | None = None,
    ) -> None:
        """``head_len``: number of tokens in pages that each request attends to; None:
        as many as its plan reads, without tokens that the step computes again.
        """
        BatchTables.__init__(self, batch, kind)
        device = batch.device
        first_read = None
        if head_len is None:
            firsts = [plan.num_anchored for plan in batch.plans]
            head_len = [plan.read - plan.num_anchored for plan in batch.plans]
            if any(firsts):
                first_read = on_device(firsts, device, torch.int32)
        KVTables.__init__(
            self,
            pages,
            self.tables,
            on_device(head_len, device, torch.int32),
            max(head_len),
            first_read,
        )
        self.requests = batch.requests
        self.positions = batch.positions

    def check_room(self, plans: Sequence[StepPlan]) -> None:
        """Raise ``ValueError`` for a plan that reads more tokens than the pages of its
        request hold: the rest of the table names a page of another request.
        """
        for plan, num_pages in zip(plans, self.num_pages, strict=True):
            room = num_pages * self.pages.page_size
            if plan.read > room:
                raise ValueError(
                    f"a step reads {plan.read} tokens, and the pages of its request "
                    f"have room for {room}; the cache method's `pages` must tell how "
                    f"many it needs"
                )

    def row_slots(self) -> Tensor:
        """Physical slots ``[num_layers, num_rows, num_kv_heads]``."""
        return self.token_slots(ALL_LAYERS, self.requests, self.positions)

    def graph_inputs(self) -> list[Tensor]:
        return [
            self.tables,
            self.head_len,
            self.token_lens,
            self.requests,
            self.positions,
        ]

    def token_slots(
        self, layer: int | slice, requests: Tensor, tokens: Tensor
    ) -> Tensor:
        """Physical slots of tokens, like ``slots``: ``[n, num_kv_heads]``, or for a
        slice of the layers ``[num_layers, n, num_kv_heads]``; below 0 for a token below
        0.
        """
        return self.pages.slots(
            self.slots(layer, requests, tokens, self.pages.page_size)
        )
