"""The autoregressive guide of Guided Diffusion (arXiv 2505.21467): checks a whole draft in one causal forward pass.

It runs through the diffusion models' own layers, and its keys and values live in pages of the same pool. A page has as
many bytes as one of the diffusion model's and holds as many of the guide's tokens as fit.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.model_loader.weight_utils import (
    download_weights_from_hf,
    initialize_single_dummy_weight,
    safetensors_weights_iterator,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from dllm_engine.kernels.paged_attention import write_slots
from dllm_engine.model_executor.batch_tables import TokenTables
from dllm_engine.model_executor.checkpoint import check_safetensors
from dllm_engine.model_executor.layer_pass import LayerPass
from dllm_engine.model_executor.models.causal import CausalModel
from dllm_engine.model_executor.models.decoder import DecoderLayer, RotaryPhases, VocabularyShard
from dllm_engine.model_executor.page_memory import PageMemory, PageView
from dllm_engine.model_executor.step_batch import Canvas, StepBatch
from dllm_engine.model_executor.token_prediction import gather_from_ranks
from dllm_engine.scheduler.page_layout import PageKind


@dataclass(frozen=True)
class Draft:
    """What the diffusion model proposes for the leftmost masked positions of a block."""

    canvas: Canvas
    positions: torch.Tensor
    """``[num_drafted]``, ascending; no masked position lies left of or between them."""
    tokens: torch.Tensor
    """``[num_drafted]``"""


@dataclass(frozen=True)
class Verdict:
    """What the guide makes of a draft."""

    ranks: torch.Tensor
    """``[num_drafted]``: how many tokens it prefers to the drafted one; of equals the lower id."""
    tokens: torch.Tensor
    """``[num_drafted]``: its own."""


class CausalPass(LayerPass):
    """Every row through every layer; K/V go to pages by position, and a row attends to all tokens up to itself."""

    def __init__(self, batch: StepBatch, pages: PageView, head_len: list[int]) -> None:
        self.pages = pages
        self.tables = TokenTables(batch, pages, head_len, PageKind.GUIDE)
        self.cu_seqlens = torch.tensor(batch.cu_seqlens, dtype=torch.int32, device=batch.positions.device)
        self.max_seqlen = max(batch.num_rows(i) for i in range(len(head_len)))

    def __call__(self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases) -> torch.Tensor:
        for index, layer in enumerate(layers):
            q, k, v = layer.qkv(layer.attn_norm(hidden))
            q, k = layer.rope(q, phases), layer.rope(k, phases)
            slots = self.tables.row_slots(index)
            write_slots(k, self.pages.keys, slots)
            write_slots(v, self.pages.values, slots)
            attended = self.tables.attend(
                index, q, k, v, self.cu_seqlens, self.max_seqlen, attend_fresh=False, causal=True
            )
            hidden += layer.o_proj(attended)
            hidden += layer.mlp(layer.mlp_norm(hidden))
        return hidden


class Guide:
    """A loaded guide."""

    def __init__(
        self, name: str, hf_config: Any, vllm_config: VllmConfig, mask_token_id: int, device: torch.device
    ) -> None:
        """``name``: folder or Hugging Face name of the checkpoint; raises ``ValueError`` for what cannot guide."""
        dtype = vllm_config.model_config.dtype
        with set_current_vllm_config(vllm_config), set_default_torch_dtype(dtype), device:
            model = CausalModel(vllm_config=vllm_config, hf_config=hf_config)
        if vllm_config.load_config.load_format == "dummy":
            for parameter in model.parameters():
                initialize_single_dummy_weight(parameter)
        else:
            model.load_weights(_weights(name, vllm_config))
        process_weights_after_loading(model, vllm_config.model_config, device)
        self.model = model.eval()
        self.mask_token_id = mask_token_id
        self.pages: PageView | None = None

    def attach(self, memory: PageMemory) -> None:
        """Take pages from ``memory`` from now on."""
        self.pages = memory.view_for(self.model.num_kv_heads, self.model.shape.head_dim)

    def check(self, drafts: list[Draft]) -> list[Verdict]:
        """Judge drafts, each in its canvas with the drafted tokens in place.

        Feeds what the pages do not hold yet, and at least the row before the first drafted position.
        """
        assert self.pages is not None
        device = drafts[0].positions.device
        texts, spans = [], []
        for draft in drafts:
            text = draft.canvas.tokens.clone()
            text[draft.positions] = draft.tokens
            ends = draft.positions[[0, -1]].tolist()
            texts.append(text)
            spans.append((min(draft.canvas.guide_cached, ends[0] - 1), ends[1]))
        bounds = list(accumulate((stop - start for start, stop in spans), initial=0))
        batch = StepBatch(
            request_ids=[],
            plans=[],
            canvases=[draft.canvas for draft in drafts],
            cu_seqlens=bounds,
            input_ids=torch.cat([text[start:stop] for text, (start, stop) in zip(texts, spans, strict=True)]),
            positions=torch.cat([torch.arange(start, stop, device=device) for start, stop in spans]),
        )
        layer_pass = CausalPass(batch, self.pages, [stop for _, stop in spans])
        hidden = self.model(batch.input_ids, batch.positions, layer_pass)
        predicting = torch.cat(
            [
                draft.positions - 1 - start + first
                for draft, (start, _), first in zip(drafts, spans, bounds, strict=False)
            ]
        )
        ranks, tokens = self._judge(hidden[predicting], torch.cat([draft.tokens for draft in drafts]))
        for draft, text, (_, stop) in zip(drafts, texts, spans, strict=True):
            draft.canvas.guide_text = text[:stop]
        sizes = [draft.positions.numel() for draft in drafts]
        return [Verdict(*parts) for parts in zip(ranks.split(sizes), tokens.split(sizes), strict=True)]

    @staticmethod
    def roll_back(canvas: Canvas) -> None:
        """After tokens were unmasked: keep of the last check what stands in the canvas now."""
        text = canvas.guide_text
        assert text is not None
        stop = text.numel()
        wrong = canvas.masked[:stop] | (canvas.tokens[:stop] != text)
        canvas.guide_cached = int(wrong.int().argmax()) if bool(wrong.any()) else stop

    def _judge(self, hidden: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shard: VocabularyShard = self.model.compute_logits(hidden)
        logits, first = shard.logits.float(), shard.first_token
        size = logits.shape[1]
        column = self.mask_token_id - first
        if 0 <= column < size:
            # It could not be told from a position that is still open.
            logits[:, column] = -torch.inf
        best, tokens = logits.max(dim=1)
        tokens = tokens + first
        local = drafted - first
        here = (local >= 0) & (local < size)
        scores = logits.gather(1, local.clamp(0, size - 1)[:, None])[:, 0].masked_fill(~here, 0)
        ids = torch.arange(first, first + size, device=logits.device)
        known = drafted < self.model.shape.vocab_size
        sharded = get_tensor_model_parallel_world_size() > 1
        if sharded:
            scores = tensor_model_parallel_all_reduce(scores)
            winner = torch.stack(gather_from_ranks(best, get_tp_group())).argmax(dim=0, keepdim=True)
            tokens = torch.stack(gather_from_ranks(tokens, get_tp_group())).gather(0, winner)[0]
        ahead = (logits > scores[:, None]) | ((logits == scores[:, None]) & (ids < drafted[:, None]))
        ranks = ahead.sum(dim=1)
        if sharded:
            ranks = torch.stack(gather_from_ranks(ranks, get_tp_group())).sum(dim=0)
        # A token that the guide does not have comes after all that it has.
        return ranks.masked_fill(~known, self.model.shape.vocab_size), tokens


def _weights(name: str, vllm_config: VllmConfig) -> Iterable[tuple[str, torch.Tensor]]:
    check_safetensors(name)
    folder = Path(name)
    if not folder.is_dir():
        folder = Path(download_weights_from_hf(name, vllm_config.load_config.download_dir, ["*.safetensors"]))
    files = sorted(str(path) for path in folder.glob("*.safetensors"))
    return safetensors_weights_iterator(files, use_tqdm_on_load=False)
