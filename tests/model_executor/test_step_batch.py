"""How the rows of a batch are laid out."""

import pytest
import torch

from dllm_engine.model_executor.step_batch import SplitRows


@pytest.mark.parametrize(
    ("sizes", "alone", "paged", "rest"),
    [
        ([3, 4, 5], [False, True, True], [0, 3, 3, 3], [0, 4, 9]),
        ([3, 4], [False, False], [0, 3, 7], [0]),
        ([3, 4], [True, True], [0, 0, 0], [0, 3, 7]),
        ([3, 4, 5], [True, False, True], [0, 3, 7, 7], [0, 5]),
        ([3, 4], [True, False], [0, 3, 7], [0]),
    ],
)
def test_only_the_last_requests_are_taken_to_need_no_pages(sizes, alone, paged, rest):
    rows = SplitRows(sizes, alone, torch.device("cpu"))
    assert rows.paged.cu_seqlens.tolist() == paged
    assert rows.alone.cu_seqlens.tolist() == rest
    assert rows.num_paged_rows == paged[-1]
    assert rows.alone.cu_seqlens.dtype == torch.int32
