"""Page tables whose heads retain different tokens."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dllm_engine.decoding.page_layout import PageKind
from dllm_engine.decoding.step_plan import Scope
from dllm_engine.kernels.paged_attention import PagedTokens
from dllm_engine.model_executor.batch_tables import ALL_LAYERS, BatchTables
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.transfer import on_device


@dataclass
class RetainedPrompt:
    """Prompt tokens that each layer of a request has retained, on this rank."""

    kept: Tensor
    """Tokens per KV head, int64 ``[num_layers, num_kv_heads]``."""
    starts: Tensor
    """First slot of each head's range, int32 ``[num_layers, num_kv_heads]``."""
    numbers: list[Tensor] = field(default_factory=list)
    """Per layer, the index of each token among the tokens that a head has retained, or
    −1; int32 ``[prompt_length, num_kv_heads]``."""


class HeadTables(BatchTables):
    """Keys and values in packed ranges of one table that all layers share. There is a
    range per layer and head: the retained prompt tokens of the head, then the response.
    The ranges of a layer begin where those of the layer before end, so layers vote in
    order."""

    def __init__(self, batch: StepBatch, pages: PageMemory) -> None:
        super().__init__(batch, PageKind.KV)
        self.batch = batch
        self.pages = pages
        device = batch.device
        shape = pages.geometry.num_layers, pages.num_kv_heads
        for canvas in batch.canvases:
            if canvas.own is None:
                canvas.own = RetainedPrompt(
                    torch.zeros(shape, dtype=torch.int64, device=device),
                    torch.zeros(shape, dtype=torch.int32, device=device),
                )
        self.kept = torch.stack([canvas.own.kept for canvas in batch.canvases], dim=1)
        self.starts = torch.stack(
            [canvas.own.starts for canvas in batch.canvases], dim=1
        )
        """``[num_layers, num_requests, num_kv_heads]`` each; during a request's first
        pass only valid for layers that have voted.
        """
        self.requests = batch.requests
        layouts = [canvas.layout for canvas in batch.canvases]
        starts = np.repeat([layout.prompt_length for layout in layouts], batch.sizes)
        self.response_index = on_device(batch.host_positions - starts, device)
        """Response position of each row; negative in the prompt."""
        read_of_response = [
            plan.read - layout.prompt_length
            for layout, plan in zip(layouts, batch.plans, strict=True)
        ]
        self.head_len = self.kept.int() + on_device(
            read_of_response, device, torch.int32
        ).unsqueeze(1)
        """Number of tokens that rows attend to, per head, like ``kept``. The end of a
        response that no row reads does not count.
        """
        self.token_stride = torch.ones(
            len(batch.plans), dtype=torch.int32, device=device
        )
        self.max_head_len = max(layout.canvas_length for layout in layouts)
        self.prompts = [
            i
            for i, plan in enumerate(batch.plans)
            if plan.scope in (Scope.ALL, Scope.PROMPT)
        ]
        """Requests whose prompt is recomputed."""

    def retain(self, layer: int, index: int, chosen: Tensor, kept: Tensor) -> None:
        """Set the tokens that a layer of a request retains. ``chosen``: bool
        ``[num_kv_heads, prompt_length]``; ``kept``: its row sums."""
        numbers = (chosen.cumsum(dim=1) - 1).masked_fill(~chosen, -1)
        canvas = self.batch.canvases[index]
        retained: RetainedPrompt = canvas.own
        retained.numbers.append(numbers.T.int())
        retained.kept[layer] = self.kept[layer, index] = kept
        lengths = retained.kept[: layer + 1] + canvas.layout.gen_length
        ends = lengths.flatten().cumsum(dim=0)[-len(kept) :]
        retained.starts[layer] = self.starts[layer, index] = ends - lengths[-1]
        read_of_response = self.batch.plans[index].read - canvas.layout.prompt_length
        self.head_len[layer, index] = kept + read_of_response

    def graph_inputs(self) -> list[Tensor]:
        return [
            self.tables,
            self.kept,
            self.head_len,
            self.starts,
            self.requests,
            self.response_index,
        ]

    def row_slots(self) -> "Tensor | HeadTables":
        """Slots of all rows by layer; −1 for a row that is not kept."""
        # While a request votes, the ranges of a layer depend on the votes of the layers
        # before it, so slots are computed layer by layer.
        return self if self.prompts else self[ALL_LAYERS]

    def __getitem__(self, layer: int | slice) -> Tensor:
        """Slots of rows in a layer, ``[num_rows, num_kv_heads]``; for a slice of the
        layers ``[num_layers, num_rows, num_kv_heads]``. With a slice, no prompt may be
        recomputed."""
        start = self.starts[layer]
        slots = (start + self.kept[layer])[..., self.requests, :] + self.response_index[
            :, None
        ]
        slots.masked_fill_((self.response_index < 0)[:, None], -1)
        for i in self.prompts:
            first_row = self.batch.bounds[i]
            layer_numbers = self.batch.canvases[i].own.numbers
            # A request that votes in this pass may not have voted for this layer yet,
            # when rows of other requests are compared.
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
