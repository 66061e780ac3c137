"""The engine decodes exactly as the authors' code, and so do the plain versions:
tokens, order, and all cases state.
"""

import json
from typing import Any

import pytest

from tests.oracles.decode import decode
from tests.oracles.decoding import Decoding
from tests.oracles.models import PlainModel
from tests.support.answers import Answer, answers
from tests.support.reference_cases import (
    KINDS,
    MORE,
    ReferenceRow,
    assert_as_stated,
    by_engine,
    reference_cases,
    reference_rows,
)

ROWS = reference_rows(*KINDS)
MORE_ROWS = reference_rows(*MORE)
GROUPS = by_engine([*ROWS, *MORE_ROWS])


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


def assert_as_the_authors(row: ReferenceRow, answer: Answer | Decoding) -> None:
    if row.kind not in MORE:
        assert_as_stated(row, answer)
        return
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


@pytest.mark.parametrize("group", GROUPS)
def test_cases_of_one_engine_in_one_batch_and_one_alone(engines, checkpoint_of, group):
    rows = GROUPS[group]
    model, engine = checkpoint_of(rows[0].case["model"]), rows[0].engine
    config = json.loads((model / "config.json").read_text())
    positions = config.get("max_position_embeddings") or config["max_sequence_length"]
    # Weights of an adapter are an engine's own.
    start = engines if "draft_lora" in engine["cache_options"] else engines.shared
    llm = start(model, max_model_len=min(512, positions), page_size=16, **engine)
    shortest = min(rows, key=lambda row: row.fields["gen_length"])
    for some in (rows, [shortest]):
        requests = [(row.prompt, row.fields) for row in some]
        for row, answer in zip(some, answers(llm, requests), strict=True):
            assert_as_the_authors(row, answer)


@pytest.mark.parametrize("row", short(ROWS) + MORE_ROWS, ids=lambda row: row.name)
def test_the_plain_version_is_the_authors(checkpoint_of, row):
    model = PlainModel(checkpoint_of(row.case["model"]))
    answer = decode(model, row.prompt, **row.engine, **row.fields)
    # ES-dLLM takes the two most confident of fewer rows that have a confidence: which
    # others, PyTorch's order decides. And the plain version without a cache has Dream's
    # sampler, not ES-dLLM's.
    without_cache = model.is_dream and row.engine["cache_method"] == "none"
    if row.kind != "es_dllm" or (answer.closest > 0 and not without_cache):
        assert_as_the_authors(row, answer)


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
