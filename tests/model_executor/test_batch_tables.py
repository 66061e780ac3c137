"""Page tables of a batch."""

from types import SimpleNamespace
from typing import Any

import pytest

from dllm_engine.model_executor.batch_tables import TokenTables


def test_a_step_that_reads_more_than_its_pages_hold_is_named():
    tables: Any = SimpleNamespace(num_pages=[2], pages=SimpleNamespace(page_size=8))
    plan: Any = SimpleNamespace(read=16)
    TokenTables.check_room(tables, [plan])
    plan.read = 17
    with pytest.raises(ValueError, match=r"reads 17 tokens, .* room for 16; "):
        TokenTables.check_room(tables, [plan])
