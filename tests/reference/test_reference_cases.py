"""The engine decodes exactly as the authors' code, and so do the plain versions:
tokens, order, and all cases state.
"""

from typing import Any

import pytest

from tests.oracles.decode import decode
from tests.oracles.models import PlainModel
from tests.support.answers import answers
from tests.support.reference_cases import (
    KINDS,
    ReferenceRow,
    assert_as_stated,
    by_engine,
    reference_cases,
    reference_rows,
)

ROWS = reference_rows(*KINDS)
GROUPS = by_engine(ROWS)


def short(rows: list[ReferenceRow], most: int = 2) -> list[ReferenceRow]:
    """Some rows of each kind, model and method that are soon done by
    a plain version.
    """
    found: dict[tuple[str, str, str], list[ReferenceRow]] = {}
    for row in rows:
        if row.case["num_forward_passes"] <= 32 and len(row.prompt) <= 17:
            found.setdefault(
                (row.kind, row.case["model"], row.engine["cache_method"]), []
            ).append(row)
    return [row for group in found.values() for row in group[:most]]


def assert_answers(llm, rows: list[ReferenceRow]) -> None:
    for row, answer in zip(
        rows, answers(llm, [(row.prompt, row.fields) for row in rows]), strict=True
    ):
        assert_as_stated(row, answer)


@pytest.mark.parametrize("group", GROUPS)
def test_cases_of_one_engine_in_one_batch_and_one_alone(engines, checkpoint_of, group):
    rows = GROUPS[group]
    model = rows[0].case["model"]
    # The longest canvas has 264 positions.
    longest = 256 if "_" in model else 512
    llm = engines.shared(
        checkpoint_of(model), max_model_len=longest, page_size=16, **rows[0].engine
    )
    assert_answers(llm, rows)
    if len(rows) > 1:
        assert_answers(llm, [min(rows, key=lambda row: row.case["num_forward_passes"])])


@pytest.mark.parametrize("row", short(ROWS), ids=lambda row: row.name)
def test_the_plain_version_is_the_authors(checkpoint_of, row):
    model = PlainModel(checkpoint_of(row.case["model"]))
    answer = decode(model, row.prompt, **row.engine, **row.fields)
    # ES-dLLM takes the two most confident of fewer rows that have a confidence: which
    # others, PyTorch's order decides. And the plain version without a cache has Dream's
    # sampler, not ES-dLLM's.
    without_cache = model.is_dream and row.engine["cache_method"] == "none"
    if row.kind != "es_dllm" or (answer.closest > 0 and not without_cache):
        assert_as_stated(row, answer)


ENDS = {"eos_token_id": "eos_token_id", "end_of_turn_token_id": "eot_token_id"}
"""What a checkpoint's config calls the tokens of a case."""


@pytest.mark.parametrize(
    "case", reference_cases("end_tokens_llada"), ids=lambda case: case["name"]
)
def test_switches_against_early_end_tokens(
    engines, reference_checkpoints, monkeypatch, case
):
    asked, prompt = case["hyperparameters"], case["prompt_ids"]
    names = (
        "gen_length",
        "block_length",
        "steps",
        "logits_eos_inf",
        "confidence_eos_eot_inf",
    )
    fields = {name: asked[name] for name in names if name in asked}
    llm = engines(reference_checkpoints / case["model"])
    model = PlainModel(reference_checkpoints / case["model"])
    for ours, theirs in ENDS.items():
        config = llm.llm_engine.vllm_config.model_config.hf_config
        monkeypatch.setattr(config, ours, asked[theirs], raising=False)
    model.end_tokens = [asked["eos_token_id"]]
    model.turn_ends = [asked["eot_token_id"]]
    found: list[Any] = answers(llm, [(prompt, fields)])
    for answer in (*found, decode(model, prompt, **fields)):
        assert (prompt + answer.tokens, answer.order) == (
            case["output_ids"],
            case["unmasked_per_step"],
        )
