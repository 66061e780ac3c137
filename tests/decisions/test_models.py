"""Decisions by models of every family, against the enumeration of all accepted texts
with a plain forward pass.
"""

import random

import numpy as np
import pytest
import torch

from dllm_engine import DiffusionParams
from dllm_engine.request_options.errors import InvalidRequestError
from tests.oracles.decisions import decide, logprobs_of
from tests.oracles.models import PlainModel
from tests.support.engines import assert_nothing_left, generate, runner_of
from tests.support.plans import FULL_METHODS
from tests.support.random_decisions import (
    assert_same_decisions,
    decision_params,
    listed,
    random_decision,
)

FULL = ["llada", "dream", "llada_moe", "illada", "a2d", "open_dcoder"]
BY_BLOCKS = [
    "sdar",
    "sdar_moe",
    "dream_reasoner",
    "stable_diffcoder",
    "llada2",
    "a2d_bd3lm",
]
NUM_CASES = 56


def drawn(seed, count=NUM_CASES):
    rng = random.Random(seed)
    decisions = [random_decision(rng) for _ in range(count)]
    return decisions, [
        [rng.randrange(60, 140) for _ in range(rng.randint(1, 40))] for _ in decisions
    ]


def decided(llm, decisions, prompts, **options):
    outputs = generate(
        llm,
        prompts,
        [
            DiffusionParams(**decision_params(decision, **options))
            for decision, _, _ in decisions
        ],
    )
    assert_nothing_left(llm)
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, "none") for family in (*FULL, *BY_BLOCKS)),
        *((family, "block") for family in BY_BLOCKS),
        *((family, "focus") for family in ("sdar", "dream_reasoner")),
    ],
)
def test_probabilities(engines, request, family, method):
    checkpoint = request.getfixturevalue(f"tiny_{family}")
    model = PlainModel(checkpoint)
    llm = engines(checkpoint, cache_method=method)
    decisions, prompts = drawn(family)
    ends = llm.llm_engine.vllm_config.model_config.hf_config.eos_token_id
    for (decision, fields, literals), prompt, answer in zip(
        decisions, prompts, decided(llm, decisions, prompts), strict=True
    ):
        plain = decide(
            fields,
            literals,
            logprobs_of(model, prompt, decision.template),
            [ends],
        )
        answers = answer.diffusion.decision
        assert answer.diffusion.forward_passes == 1
        for name, own in answers.items():
            assert listed(own) == pytest.approx(plain.probabilities[name], abs=1e-4)
            assert sum(listed(own).values()) == pytest.approx(1)
        assert tuple(own["value"] for own in answers.values()) == plain.values


@pytest.mark.parametrize("method", ["none", *FULL_METHODS])
def test_beside_other_requests_and_alone(engines, tiny_llada, method):
    """Whatever the cache method keeps for others, a decision computes its canvas."""
    llm = engines(tiny_llada, cache_method=method)
    decisions, prompts = drawn("mixed", 6)
    others = [
        DiffusionParams(gen_length=40, steps=20, block_length=20, ignore_eos=True)
    ] * 3
    expected = [
        list(output.outputs[0].token_ids)
        for output in generate(llm, prompts[:3], others)
    ]
    params = [
        DiffusionParams(**decision_params(decision, passes=2))
        for decision, _, _ in decisions
    ]
    outputs = generate(llm, prompts[:3] + prompts, [*others, *params])
    assert_nothing_left(llm)
    assert [list(output.outputs[0].token_ids) for output in outputs[:3]] == expected
    completions = [output.outputs[0] for output in outputs[3:]]
    plain = engines(tiny_llada, cache_method="none")
    pairs = zip(decisions, prompts, strict=True)
    assert_same_decisions(
        completions,
        [decided(plain, [each], [prompt], passes=2)[0] for each, prompt in pairs],
    )
    for completion, (_, fields, _) in zip(completions, decisions, strict=True):
        assert completion.diffusion.forward_passes <= min(2, len(fields))
        assert set(completion.diffusion.refresh_states) == {"full"}
        assert completion.diffusion.pages_held == 0


@pytest.mark.parametrize(("method", "together"), [("none", 2), ("dual", 1)])
def test_passes_beside_another_request(
    engines, tiny_llada, monkeypatch, method, together
):
    """One pass for both, if that of the cache method computes whole canvases too."""
    llm = engines(tiny_llada, cache_method=method)
    ((decision, _, _),), prompts = drawn("passes", 1)
    params = [
        DiffusionParams(gen_length=8, steps=8, block_length=8),
        DiffusionParams(**decision_params(decision)),
    ]
    runner, sizes = runner_of(llm), []
    run_batch = runner._run_batch

    def noted(layout, plans, *args):
        sizes.append(len(plans))
        return run_batch(layout, plans, *args)

    monkeypatch.setattr(runner, "_run_batch", noted)
    generate(llm, prompts * 2, params)
    assert max(sizes) == together


@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_a_shared_prompt_is_computed_once(engines, request, family):
    llm = engines(request.getfixturevalue(f"tiny_{family}"), cache_method="block")
    decisions, _ = drawn("shared", 3)
    prompt = [*range(60, 140)] * 2
    llm.reset_prefix_cache()
    first, *others = [
        decided(llm, [decision], [prompt])[0].diffusion.tokens_computed
        for decision in decisions
    ]
    assert first > len(prompt)
    assert all(rows < len(prompt) for rows in others)


def test_logits_that_are_not_finite_end_a_decision(engines, tiny_llada, monkeypatch):
    llm = engines(tiny_llada)
    decisions, prompts = drawn("not finite", 2)
    predictor = runner_of(llm).rank.predictor
    logprobs_at = predictor.logprobs_at

    def broken(hidden, asked):
        first, *others = logprobs_at(hidden, asked)
        return [first * torch.nan, *others]

    monkeypatch.setattr(predictor, "logprobs_at", broken)
    failed, other = decided(llm, decisions, prompts)
    assert "NaN or infinite" in failed.diffusion.error
    assert other.diffusion.decision


def test_log_probabilities_are_those_among_accepted_texts(engines, tiny_llada):
    llm = engines(tiny_llada)
    decisions, prompts = drawn("logprobs", 20)
    for answer, (decision, fields, _) in zip(
        decided(llm, decisions, prompts, logprobs=3), decisions, strict=True
    ):
        token_ids = list(answer.token_ids)
        values = [
            step[token].logprob
            for step, token in zip(answer.logprobs, token_ids, strict=True)
        ]
        given = [token is not None for token in decision.template[: len(token_ids)]]
        assert all(
            value == 0
            for value, is_given in zip(values, given, strict=True)
            if is_given
        )
        for step in answer.logprobs:
            assert sum(np.exp(each.logprob) for each in step.values()) <= 1 + 1e-5
        if len(fields) == 1:
            (own,) = answer.diffusion.decision.values()
            if None in decision.template and decision.values[0]:
                assert np.exp(sum(values)) == pytest.approx(
                    own["probability"], abs=1e-4
                )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.9}, "threshold=0.9: a decision"),
        ({"temperature": 0.5}, "temperature=0.5: a decision"),
        ({"logit_bias": {5: 1.0}}, "logit_bias"),
        ({"passes": 0}, "passes"),
        ({"stream_granularity": "step"}, "stream_granularity"),
    ],
)
def test_what_only_generation_has_is_refused(engines, tiny_llada, options, message):
    llm = engines(tiny_llada)
    decisions, prompts = drawn("refused", 1)
    with pytest.raises(InvalidRequestError, match=message):
        decided(llm, decisions, prompts, **options)
    with pytest.raises(
        InvalidRequestError, match="passes=2 counts the passes of a decision"
    ):
        generate(llm, prompts, [DiffusionParams(gen_length=8, passes=2)])
    assert_nothing_left(llm)


@pytest.mark.parametrize("family", ["fast_dllm_v2", "nemotron_labs"])
def test_models_that_seed_their_blocks_make_none(engines, request, family):
    llm = engines(request.getfixturevalue(f"tiny_{family}"))
    decisions, prompts = drawn(family, 1)
    with pytest.raises(InvalidRequestError, match=r"decisions of .* not supported"):
        decided(llm, decisions, prompts)
