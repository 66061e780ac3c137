"""Keys and values in pages: what is appended fills the slots behind those held, token by token, and no others."""

import pytest
import torch

from dllm_engine.model_executor.page_memory import PageMemory


@pytest.mark.parametrize("table_type", [torch.int32, torch.int64])
@pytest.mark.parametrize(("held", "added"), [(0, 9), (4, 8), (5, 1), (7, 6), (3, 0)])
def test_appended_tokens_fill_the_slots_behind_those_held_and_nothing_else(held, added, table_type):
    page_size, heads, dim = 4, 2, 8
    memory = PageMemory(7, page_size, heads, dim, heads, heads * dim, torch.float32, torch.device("cpu"))
    memory.memory.fill_(torch.nan)
    k, v = torch.randn(2, added, heads, dim)
    expected = memory.memory.clone()
    table = [5, 2, 6, 1]
    for token in range(held, held + added):
        page, place = table[token // page_size], token % page_size
        expected[page, :, place * heads : (place + 1) * heads] = torch.stack((k[token - held], v[token - held]))
    memory.append(k, v, torch.tensor(table, dtype=table_type), held)
    torch.testing.assert_close(memory.memory, expected, rtol=0, atol=0, equal_nan=True)
    assert int((~memory.memory.isnan()).sum()) == 2 * added * heads * dim
