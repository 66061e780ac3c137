"""Stable-DiffCoder's loop is that of the authors' ``generate_block``: a last block that ends with the response, steps
that share a block's masks, a threshold that a position may just reach, and an end after a finished block."""

import pytest
import torch

from tests.oracles.decode import decode
from tests.oracles.models import PlainModel
from tests.support.answers import answers
from tests.support.reference_cases import Case, reference_cases

CASES = reference_cases("stable_diffcoder")


def fields_of(case: Case) -> dict:
    h = case["hyperparameters"]
    fields = {name: h[name] for name in ("gen_length", "block_length", "threshold") if name in h}
    if "threshold" not in h:
        fields["steps_per_block"] = h["steps"] // (h["gen_length"] // h["block_length"])
    return fields | ({"stop_token_ids": [h["eos_id"]]} if "eos_id" in h else {})


def assert_as_stated(case: Case, tokens: list[int], order: list[list[int]]) -> None:
    expected, end = case["output_ids"][len(case["prompt_ids"]) :], case["hyperparameters"].get("eos_id")
    if end in expected:
        # The authors decode the rest of the block as well, and fill it with the token.
        expected = expected[: expected.index(end) + 1]
    assert (tokens, order) == (expected, case["unmasked_per_step"][: len(order)]), case["name"]


@pytest.mark.parametrize("cache_method", ["block", "none"])
def test_an_engine_fills_the_same_in_the_same_order(engines, tiny_stable_diffcoder, cache_method):
    llm = engines(tiny_stable_diffcoder, cache_method=cache_method)
    found = answers(llm, [(case["prompt_ids"], fields_of(case)) for case in CASES])
    for case, answer in zip(CASES, found, strict=True):
        assert_as_stated(case, answer.tokens, answer.order)
    lengths = {len(case["prompt_ids"]) % case["hyperparameters"]["block_length"] for case in CASES}
    assert len(lengths) > 3, "last blocks of several lengths"


def test_the_plain_version_fills_the_same_in_the_same_order(tiny_stable_diffcoder):
    torch.set_num_threads(1)
    model = PlainModel(tiny_stable_diffcoder)
    for case in CASES:
        run = decode(model, case["prompt_ids"], "block", **fields_of(case))
        assert_as_stated(case, run.tokens, run.order)
