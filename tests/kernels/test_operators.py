"""Schema, fake implementation and tracing of every operator, as torch.compile and graphs need them."""

import importlib
import itertools
import pkgutil

import pytest
import torch

import dllm_engine.kernels
from tests.support.paged_cases import paged_case

for module in pkgutil.iter_modules(dllm_engine.kernels.__path__):
    importlib.import_module(f"dllm_engine.kernels.{module.name}")  # registers its operators

QUERIES, VALUES, ROWS = torch.randn(11, 4, 8), torch.randn(11, 2, 8), torch.randn(3, 8)
PAGES, FEATURES = torch.randn(3, 6, 8), torch.randn(3, 2, 8)
TWO_OF_TWO, WITH_MISSING = torch.tensor([[0, 3], [5, 8]]), torch.tensor([[0, -1], [-1, 8]])
CASES = [
    ("bidirectional_attention", (QUERIES, torch.randn(11, 4, 8), torch.randn(11, 4, 8), [0, 3, 6, 11])),
    ("bidirectional_attention", (QUERIES, VALUES, VALUES, [0, 3, 6, 11])),
    ("mean_query_scores", (QUERIES, VALUES)),
    ("rotate_", (torch.randn(3, 2, 8), ROWS)),
    ("token_statistics", (torch.randn(4, 9), 2, True, True)),
    ("token_statistics", (torch.randn(4, 9), 2, False, False)),
    ("voting_scores", (QUERIES, VALUES, torch.randn(11, 4))),
    *[("write_slots", (VALUES[:2], PAGES, slots)) for slots in (TWO_OF_TWO, WITH_MISSING)],
    *[("similarity_sums", (VALUES[:2], PAGES, slots)) for slots in (TWO_OF_TWO, WITH_MISSING)],
    *[(f"{verb}_features", (ROWS, FEATURES, torch.tensor(slots)))
      for verb, slots in itertools.product(("add", "write"), ([0, 3, 2], [5, -1, 1]))],
    *[("read_features", (FEATURES, torch.tensor(slots))) for slots in ([0, 3, 2], [5, -1, 1])],
    *[("paged_attention", paged_case([3, 3, 5], [[6, 6], [6, 6], [9, 2]], 4, 8, packed=packed).arguments(*semantics))
      for packed, *semantics in itertools.product((False, True), repeat=4)],
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_operator_is_registered_correctly(name, arguments):
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.dllm, name).default, arguments, test_utils=utils)
