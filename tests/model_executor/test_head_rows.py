"""Logits are made for the masked positions of the current block alone."""

import pytest

from dllm_engine import DiffusionParams
from tests.support.engines import generate, runner_of


@pytest.mark.parametrize("cache_method", ["none", "dllm_cache"])
@pytest.mark.parametrize(("family", "rows"), [("llada", [8, 6, 4, 2] * 2), ("dream", [1, 7, 5, 3] * 2)])
def test_rows_through_the_head(engines, request, monkeypatch, family, rows, cache_method):
    """What may be unmasked in the current block, and nothing at a finished one. (Dream's first step of a block is about
    its first position.)"""
    llm = engines(request.getfixturevalue(f"tiny_{family}"), cache_method=cache_method)
    predictor, found = runner_of(llm).predictor, []
    compute = predictor.compute_logits
    monkeypatch.setattr(predictor, "compute_logits", lambda hidden: found.append(len(hidden)) or compute(hidden))
    generate(llm, [[3, 1, 4, 1, 5]], DiffusionParams(gen_length=16, block_length=8, steps=8, ignore_eos=True))
    assert found == rows
