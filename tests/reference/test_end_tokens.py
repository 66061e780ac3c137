"""LLaDA's switches against early end tokens do what the authors' ``generate.py`` does."""

import pytest
import torch

from tests.oracles.decode import decode
from tests.oracles.models import PlainModel
from tests.support.answers import answers
from tests.support.reference_cases import Case, reference_cases

CASES = reference_cases("end_tokens_llada")
ENDS = {"eos_token_id": "eos_token_id", "end_of_turn_token_id": "eot_token_id"}
"""What a checkpoint's config calls the tokens of a case."""


def fields_of(case: Case) -> dict:
    names = ("gen_length", "block_length", "steps", "logits_eos_inf", "confidence_eos_eot_inf")
    return {name: case["hyperparameters"][name] for name in names if name in case["hyperparameters"]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_engine_and_plain_version_fill_the_same_in_the_same_order(engines, reference_checkpoints, monkeypatch, case):
    torch.set_num_threads(1)
    prompt, expected = case["prompt_ids"], case["output_ids"][len(case["prompt_ids"]) :]
    llm, model = engines(reference_checkpoints / case["model"]), PlainModel(reference_checkpoints / case["model"])
    config, ends = llm.llm_engine.vllm_config.model_config.hf_config, []
    for ours, theirs in ENDS.items():
        ends.append(case["hyperparameters"][theirs])
        monkeypatch.setattr(config, ours, ends[-1], raising=False)
    model.end_tokens, model.turn_ends = ends[:1], ends[1:]
    (answer,) = answers(llm, [(prompt, fields_of(case))])
    run = decode(model, prompt, **fields_of(case))
    for tokens, order in ((answer.tokens, answer.order), (run.tokens, run.order)):
        assert (tokens, order) == (expected, case["unmasked_per_step"])
