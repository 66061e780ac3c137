"""The parts of one rank of an engine: its model, its canvases and its pages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_engine.model_executor.batch_tables import padded_width
from dllm_engine.model_executor.canvas_store import CanvasStore
from dllm_engine.model_executor.guide.model import Guide
from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.page_memory import PageMemory
from dllm_engine.model_executor.token_prediction import TokenPredictor
from dllm_engine.options import EngineOptions


@dataclass(frozen=True)
class Rank:
    """One rank, once its weights are loaded. Every rank runs the same code on the same
    tokens.
    """

    options: EngineOptions
    device: torch.device
    dtype: torch.dtype
    model: DiffusionDecoder
    predictor: TokenPredictor
    guide: Guide | None
    end_tokens: Tensor
    """End tokens of the model, int64."""
    store: CanvasStore
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pages: PageMemory | None = None
    """None until vLLM has sized the pool, and for cache methods without pages."""

    @property
    def max_pages(self) -> int:
        """The most pages of a request in a layer, padded like page tables."""
        return padded_width(-(-self.max_model_len // self.options.page_size))
