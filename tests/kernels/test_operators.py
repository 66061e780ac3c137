"""Schema, fake implementation and tracing of every operator, as torch.compile and graphs need them."""

import importlib
import itertools
import pkgutil

import pytest
import torch

import dllm_engine.kernels
from dllm_engine.check.paged_case import paged_case
from dllm_engine.kernels.eviction import mean_query_scores

for module in pkgutil.iter_modules(dllm_engine.kernels.__path__):
    importlib.import_module(f"dllm_engine.kernels.{module.name}")  # registers its operators

QUERIES, VALUES, ROWS = torch.randn(11, 4, 8), torch.randn(11, 2, 8), torch.randn(3, 8)
BOUNDS, CU_SEQLENS = [0, 3, 6, 11], torch.tensor([0, 3, 6, 11], dtype=torch.int32)
PAGES, FEATURES = torch.randn(3, 6, 8), torch.randn(3, 2, 8)
TWO_OF_TWO, WITH_MISSING = torch.tensor([[0, 3], [5, 8]]), torch.tensor([[0, -1], [-1, 8]])
CASES = [
    ("bidirectional_attention", (QUERIES, torch.randn(11, 4, 8), torch.randn(11, 4, 8), BOUNDS, CU_SEQLENS)),
    ("bidirectional_attention", (QUERIES, VALUES, VALUES, BOUNDS, CU_SEQLENS)),
    ("mean_query_scores", (QUERIES, VALUES, torch.tensor([[0, 3, 2, 6, 3, 2]]), 6)),
    ("filtered_logits", (torch.randn(4, 9), 0.7, 0.9, 5, 2)),
    ("gumbel_max", (torch.randn(4, 9), *torch.zeros(3, 4, dtype=torch.int64), 5, 0.7, 2)),
    ("rotate_", (torch.randn(3, 2, 8), torch.tensor([2, 0, 2]), ROWS)),
    ("token_statistics", (torch.randn(4, 9), 2, True, True)),
    ("token_statistics", (torch.randn(4, 9), 2, False, False)),
    *[(name, (QUERIES, VALUES, torch.randn(11, 4))) for name in ("voting_scores", "summed_probabilities")],
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


def test_compilers_see_an_operator_as_one():
    seen = []

    def compiler(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    arguments = (QUERIES, VALUES, torch.tensor([[0, 3, 2, 6, 3, 2]]), 6)
    torch.compile(mean_query_scores, backend=compiler, fullgraph=True)(*arguments)
    assert torch.ops.dllm.mean_query_scores.default in seen
