"""Families of smaller models decode as their authors' code: tokens, and the order in
which they are filled and taken back.
"""

import json

import pytest

from tests.oracles.decode import decode
from tests.oracles.decoding import Decoding
from tests.oracles.models import PlainModel
from tests.support.answers import Answer, answers
from tests.support.reference_cases import (
    MORE,
    ReferenceRow,
    by_engine,
    reference_rows,
)

ROWS = reference_rows(*MORE)
GROUPS = by_engine(ROWS)


@pytest.mark.parametrize("group", GROUPS)
def test_cases_of_one_engine_in_one_batch_and_one_alone(
    engines, reference_checkpoints, group
):
    rows = GROUPS[group]
    model = reference_checkpoints / rows[0].case["model"]
    config = json.loads((model / "config.json").read_text())
    longest = min(512, config["max_position_embeddings"])
    engine = rows[0].engine
    # Weights of an adapter are an engine's own.
    start = engines if "draft_lora" in engine["cache_options"] else engines.shared
    llm = start(model, max_model_len=longest, page_size=16, **engine)
    for some in (rows, rows[:1]):
        requests = [(row.prompt, row.fields) for row in some]
        for row, answer in zip(some, answers(llm, requests), strict=True):
            assert_as_the_authors(row, answer)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_plain_version_is_the_authors(reference_checkpoints, row):
    model = PlainModel(reference_checkpoints / row.case["model"])
    assert_as_the_authors(row, decode(model, row.prompt, **row.engine, **row.fields))


def assert_as_the_authors(row: ReferenceRow, answer: Answer | Decoding) -> None:
    assert answer.tokens == row.response, row.name
    if row.kind == "spec_nemotron_labs":
        assert_rounds(row, answer)
    elif row.fields.get("decoding") != "autoregressive":
        assert_order(row, answer)


def assert_rounds(row: ReferenceRow, answer: Answer | Decoding) -> None:
    """Tokens verified before each pass, as far as rounds end before the response does.
    The authors' last rounds go on behind it.
    """
    end = len(row.prompt) + row.fields["gen_length"] - row.fields["block_length"]
    stated = [n for n in row.case["positions_before_per_pass"] if n < end]
    assert [step[0] for step in answer.computed][: len(stated)] == stated, row.name


def assert_order(row: ReferenceRow, answer: Answer | Decoding) -> None:
    """The authors do not count the first tokens of blocks that a pass over what is
    before them predicts.
    """
    order = answer.order
    if row.kind in ("block_fast_dllm_v2", "block_nemotron_labs"):
        origin = len(row.prompt) if "nemotron" in row.kind else 0
        length = row.fields["block_length"]
        order = [step for step in order if (step[0] - origin) % length or step[1:]]
    filled = [step[row.row] for step in row.case["unmasked_per_step"]]
    assert order == filled[: len(order)], row.name
    if row.fields.get("unmasking") == "p2":
        taken_back = [step[row.row] for step in row.case["remasked_per_step"]]
        found = answer.traces["remasked_per_step"]
        assert [[list(pair) for pair in step] for step in found] == taken_back
