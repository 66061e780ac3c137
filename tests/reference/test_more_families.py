"""Families of smaller models decode as their authors' code: tokens, and the order in
which they are filled and taken back.
"""

import pytest

from tests.support.answers import answers
from tests.support.reference_cases import MORE, by_engine, reference_rows

GROUPS = by_engine(reference_rows(*MORE))


@pytest.mark.parametrize("group", GROUPS)
def test_cases_of_one_engine_in_one_batch_and_one_alone(
    engines, reference_checkpoints, group
):
    rows = GROUPS[group]
    model = reference_checkpoints / rows[0].case["model"]
    llm = engines.shared(model, max_model_len=512, page_size=16, **rows[0].engine)
    for some in (rows, rows[:1]):
        requests = [(row.prompt, row.fields) for row in some]
        for row, answer in zip(some, answers(llm, requests), strict=True):
            assert answer.tokens == row.response, row.name
            filled = [step[row.row] for step in row.case["unmasked_per_step"]]
            assert answer.order == filled[: len(answer.order)], row.name
            if "remasked_per_step" in row.case and row.fields["unmasking"] == "p2":
                taken_back = [step[row.row] for step in row.case["remasked_per_step"]]
                found = answer.traces["remasked_per_step"]
                assert [[list(pair) for pair in step] for step in found] == taken_back
