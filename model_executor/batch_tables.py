"""Page tables of a batch's requests side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.page_layout import PageKind
from dllm_engine.decoding.step_plan import Scope
from dllm_engine.kernels.paged_attention import PagedTokens
from dllm_engine.kernels.pages import feature_rows
from dllm_engine.model_executor.page_memory import PageMemory, PageView
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.transfer import on_device

ALL_LAYERS = slice(None)
WIDTH_UNIT = 8


def padded_width(num_pages: int) -> int:
    """The width of a batch's tables that hold so many pages: of few, because a recorded
    step has tables of one.
    """
    return -(-num_pages // WIDTH_UNIT) * WIDTH_UNIT


class BatchTables:
    """Tables of one kind, or of a kind per request, stacked over the requests of a
    batch.
    """

    def __init__(self, batch: StepBatch, kind: PageKind | Sequence[PageKind]) -> None:
        kinds = [kind] * len(batch.canvases) if isinstance(kind, PageKind) else kind
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

    def slots(
        self,
        layer: int | slice,
        requests: torch.Tensor,
        items: torch.Tensor,
        per_page: int,
    ) -> torch.Tensor:
        """Physical places, ``page · per_page + offset``, of items ``[n]`` in the tables
        of ``requests`` ``[n]``: int64 ``[n]``, or for a slice of the layers
        ``[num_layers, n]``."""
        return (
            self.tables[layer, requests, items // per_page].long() * per_page
            + items % per_page
        )


class FeatureTables(BatchTables):
    """Rows of features in pages, one for each position of a span of each canvas."""

    def __init__(
        self, batch: StepBatch, pages: PageMemory, spans: list[Span], width: int
    ) -> None:
        """``width``: numbers of a row."""
        super().__init__(batch, PageKind.FEATURES)
        self.requests = batch.requests
        self.rows = feature_rows(pages.memory, width)
        starts, stops = np.repeat(np.array(spans), batch.sizes, axis=0).T
        items = np.where(
            batch.host_positions < stops, batch.host_positions - starts, -1
        )
        self.items = on_device(items, batch.device)
        """Number of each batch row's position in its span; negative: it is outside."""

    def row_slots(self) -> torch.Tensor:
        """Row slots ``[num_layers, num_rows]``; −1 outside the spans."""
        slots = self.slots(
            ALL_LAYERS, self.requests, self.items.clamp(min=0), self.rows.shape[1]
        )
        return slots.masked_fill_(self.items < 0, -1)

    def graph_inputs(self) -> list[torch.Tensor]:
        return [self.requests, self.items, self.tables]


class KVTables:
    """The keys and values in pages that requests attend to, in every layer;
    token-major.
    """

    def __init__(
        self,
        pages: PageView,
        tables: torch.Tensor,
        head_len: torch.Tensor,
        max_head_len: int,
    ) -> None:
        """``tables``: int32 ``[num_layers, num_requests, most pages]``; ``head_len``:
        tokens that each request attends to, contiguous int32 ``[num_requests]``, of at
        most ``max_head_len``."""
        heads, num_requests, device = (
            pages.num_kv_heads,
            head_len.shape[0],
            head_len.device,
        )
        head_start = (
            torch.arange(heads, dtype=torch.int32, device=device)
            .expand(num_requests, -1)
            .contiguous()
        )
        token_stride = torch.full(
            (num_requests,), heads, dtype=torch.int32, device=device
        )
        self.pages, self.tables = pages, tables
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

    def set_lengths(self, head_len: torch.Tensor) -> None:
        """Set how many tokens each request attends to, in place. Requests behind those
        of ``head_len`` attend to none: what is left of their tables may be pages that
        are another's by now."""
        self.token_lens[: head_len.shape[0]], self.token_lens[head_len.shape[0] :] = (
            head_len,
            0,
        )
        self.head_len.copy_(self.token_lens[:, None])

    def paged_tokens(self, layer: int) -> PagedTokens:
        return self.layers[layer]


class TokenTables(BatchTables, KVTables):
    """Keys and values of a batch's requests, where token p of a table belongs to canvas
    position p.
    """

    def __init__(
        self,
        batch: StepBatch,
        pages: PageView,
        kind: PageKind | Sequence[PageKind] = PageKind.KV,
        head_len: list[int] | None = None,
    ) -> None:
        """``head_len``: tokens in pages that each request attends to; None: as many as
        its plan reads.
        """
        BatchTables.__init__(self, batch, kind)
        head_len = [plan.read for plan in batch.plans] if head_len is None else head_len
        device = batch.device
        KVTables.__init__(
            self,
            pages,
            self.tables,
            on_device(head_len, device, torch.int32),
            max(head_len),
        )
        self.requests, self.positions = batch.requests, batch.positions

    def row_slots(self) -> torch.Tensor:
        """Physical slots ``[num_layers, num_rows, num_kv_heads]``."""
        return self.token_slots(ALL_LAYERS, self.requests, self.positions)

    def graph_inputs(self) -> list[torch.Tensor]:
        return [
            self.tables,
            self.head_len,
            self.token_lens,
            self.requests,
            self.positions,
        ]

    def token_slots(
        self, layer: int | slice, requests: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Physical slots of tokens, as of ``slots``: ``[n, num_kv_heads]``, or of a
        slice of the layers.
        """
        return self.pages.slots(
            self.slots(layer, requests, tokens, self.pages.page_size)
        )


@dataclass
class RetainedPrompt:
    """Prompt tokens that each layer of a request retained, on this rank."""

    kept: torch.Tensor
    """Tokens per KV head, int64 ``[num_layers, num_kv_heads]``."""
    numbers: list[torch.Tensor] = field(default_factory=list)
    """Per layer, the number of each token among those that a head retained, −1 where it
    did not; int32 ``[prompt_length, num_kv_heads]``."""


class HeadTables(BatchTables):
    """Keys and values in packed ranges of one table that all layers share: layer by
    layer and head by head, the head's retained prompt tokens, then the response. A
    layer's ranges begin where those before it end, so layers vote in order."""

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        super().__init__(batch, PageKind.KV)
        self.batch, self.pages = batch, pages
        device = batch.device
        num_layers, heads = pages.geometry.num_layers, pages.num_kv_heads
        for canvas in batch.canvases:
            if canvas.cache_state is None:
                canvas.cache_state = RetainedPrompt(
                    torch.zeros(num_layers, heads, dtype=torch.int64, device=device)
                )
        self.kept = torch.stack(
            [canvas.cache_state.kept for canvas in batch.canvases], dim=1
        )
        """``[num_layers, num_requests, num_kv_heads]``"""
        gen_lengths = on_device(
            [canvas.spec.layout.gen_length for canvas in batch.canvases], device
        )
        lengths = (self.kept + gen_lengths[:, None]).int()
        in_order = lengths.transpose(0, 1)
        ends = in_order.flatten(1).cumsum(dim=1, dtype=torch.int32).view_as(in_order)
        self.starts = (ends - in_order).transpose(0, 1).contiguous()
        """First slot of each head's range. In a first pass, of the layers that have
        voted.
        """
        self.requests = batch.requests
        starts = np.repeat(
            [canvas.spec.layout.prompt_length for canvas in batch.canvases], batch.sizes
        )
        self.response_index = on_device(batch.host_positions - starts, device)
        """Position of each row in its response; negative in the prompt."""
        unread = [
            c.spec.layout.canvas_length - plan.read
            for c, plan in zip(batch.canvases, batch.plans, strict=True)
        ]
        self.head_len = lengths - on_device(unread, device, torch.int32)[:, None]
        """Tokens of each head that rows attend to, like ``kept``: none at the end of a
        response that no row reads.
        """
        self.token_stride = torch.ones(
            len(batch.plans), dtype=torch.int32, device=device
        )
        self.max_head_len = max(
            canvas.spec.layout.canvas_length for canvas in batch.canvases
        )
        self.prompts = [
            i
            for i, plan in enumerate(batch.plans)
            if plan.scope in (Scope.ALL, Scope.PROMPT)
        ]
        """Requests whose prompt is recomputed."""

    def retain(
        self, layer: int, index: int, chosen: torch.Tensor, kept: torch.Tensor
    ) -> None:
        """Set what a layer of a request retains: ``chosen`` ``[num_kv_heads,
        prompt_length]`` bool, ``kept`` its row sums."""
        numbers = (chosen.cumsum(dim=1) - 1).masked_fill(~chosen, -1)
        state: RetainedPrompt = self.batch.canvases[index].cache_state
        state.kept[layer] = kept
        state.numbers.append(numbers.T.int())
        spec = self.batch.canvases[index].spec
        self.kept[layer, index], lengths = kept, kept + spec.layout.gen_length
        self.head_len[layer, index] = kept + (
            self.batch.plans[index].read - spec.layout.prompt_length
        )
        first = (
            self.starts[layer - 1, index, -1]
            + self.kept[layer - 1, index, -1]
            + spec.layout.gen_length
            if layer
            else 0
        )
        self.starts[layer, index] = first + lengths.cumsum(dim=0) - lengths

    def graph_inputs(self) -> list[torch.Tensor]:
        return [
            self.tables,
            self.kept,
            self.head_len,
            self.starts,
            self.requests,
            self.response_index,
        ]

    def row_slots(self) -> "torch.Tensor | HeadTables":
        """The slots of all rows by layer, −1 where nothing is kept of a row."""
        # While a request votes, where a layer's ranges begin follows from the votes of
        # the layers before it.
        return self if self.prompts else self[ALL_LAYERS]

    def __getitem__(self, layer: int | slice) -> torch.Tensor:
        """The slots of rows in a layer, ``[num_rows, num_kv_heads]``; for a slice of
        the layers, with a dimension of them in front. A slice needs that no prompt is
        recomputed."""
        start = self.starts[layer]
        slots = (start + self.kept[layer])[..., self.requests, :] + self.response_index[
            :, None
        ]
        slots.masked_fill_((self.response_index < 0)[:, None], -1)
        for i in self.prompts:
            first_row, layer_numbers = (
                self.batch.bounds[i],
                self.batch.canvases[i].cache_state.numbers,
            )
            # A request that votes in this pass has not yet, where other requests' rows
            # are verified.
            if isinstance(layer, int) and layer < len(layer_numbers):
                numbers = layer_numbers[layer]
                slots[first_row : first_row + len(numbers)] = torch.where(
                    numbers >= 0, start[i] + numbers, -1
                )
        per_page = self.pages.keys.shape[1]
        physical = (
            self.tables[0][
                self.requests[:, None], slots.clamp(min=0) // per_page
            ].long()
            * per_page
        )
        return torch.where(slots >= 0, physical + slots % per_page, -1)

    def paged_tokens(self, layer: int) -> PagedTokens:
        places = self.starts[layer], self.token_stride, self.head_len[layer]
        return PagedTokens(
            self.pages.keys,
            self.pages.values,
            self.tables[0],
            *places,
            self.max_head_len,
        )
