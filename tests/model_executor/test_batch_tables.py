"""Page tables of a batch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dllm_engine.decoding.page_layout import PageKind
from dllm_engine.model_executor.batch_tables import TokenTables


def test_a_step_that_reads_more_than_its_pages_hold_is_named():
    table = torch.ones(4, 2, dtype=torch.int32)
    batch: Any = SimpleNamespace(
        canvases=[SimpleNamespace(page_tables={PageKind.KV: table})],
        plans=[SimpleNamespace(read=17, num_anchored=0)],
        device=torch.device("cpu"),
    )
    pages: Any = SimpleNamespace(page_size=8)
    with pytest.raises(ValueError, match=r"reads 17 tokens, .* room for 16; "):
        TokenTables(batch, pages)
