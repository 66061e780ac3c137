"""Predicted tokens and their statistics. Shards of the vocabulary are in
``tests/distributed``, biases in ``tests/methods/test_random_requests.py`` and
``tests/llm/test_logprobs.py``.
"""

from types import SimpleNamespace

import pytest
import torch

from dllm_engine import DiffusionParams
from dllm_engine.kernels.sampling import Counters
from dllm_engine.model_executor import head_chunks
from dllm_engine.model_executor.models.decoder import VocabularyShard
from dllm_engine.model_executor.token_prediction import (
    SamplingSettings,
    TokenPredictor,
    Wanted,
)
from dllm_engine.model_executor.unmasking.logits import best_of_class
from tests.support.engines import generate, runner_of

VOCAB = 150
MASK = 140


def random_logits(rows: int = 9, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return (
        torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale
    )


def predictor_of() -> TokenPredictor:
    """Takes logits for hidden states, so that a test names the
    distribution it means.
    """
    return TokenPredictor(
        lambda rows: VocabularyShard(rows, 0),
        VOCAB,
        MASK,
        SimpleNamespace(world_size=1),
    )


WANTED = Wanted({"entropy", "margin"}, num_logprobs=4)


def counters(rows: int) -> Counters:
    return Counters(
        torch.full((rows,), 5), torch.full((rows,), 3), torch.arange(rows) + 20
    )


def predict(logits: torch.Tensor, settings: SamplingSettings, *, predictor=None):
    predictor = predictor_of() if predictor is None else predictor
    return predictor.predict(logits, settings, counters(len(logits)), WANTED)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (1.0, 5), (0.5, 3)])
def test_mask_token_is_never_predicted(temperature, top_p, top_k):
    logits = random_logits()
    best = logits.argmax(-1)
    logits[:, MASK] = logits.amax(-1) + 1
    got = predict(logits, SamplingSettings(temperature, top_p, top_k, tempered=True))
    assert (got.token != MASK).all()
    if temperature == 0:
        assert torch.equal(got.token, best)


@pytest.mark.parametrize("rows_at_once", [0, 1, 4, 100])
def test_logits_of_few_rows_are_computed_at_once(monkeypatch, rows_at_once):
    predictor, sizes = predictor_of(), []
    compute = predictor.compute_logits
    predictor.compute_logits = lambda rows: sizes.append(len(rows)) or compute(rows)
    monkeypatch.setattr(
        head_chunks, "MAX_LOGITS_PER_CHUNK", rows_at_once * VOCAB + VOCAB - 1
    )
    predict(random_logits(), SamplingSettings(1.0, 0.9, 7, True), predictor=predictor)
    assert max(sizes) == min(max(rows_at_once, 1), 9)
    assert sum(sizes) == 9


@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
def test_tokens_are_asked_about_at_any_rows_in_any_order(monkeypatch, rows_at_once):
    monkeypatch.setattr(head_chunks, "MAX_LOGITS_PER_CHUNK", rows_at_once * VOCAB)
    logits, rows = random_logits(), torch.randint(0, 9, (30,))
    tokens, logprobs = torch.randint(0, VOCAB, (30,)), logits.log_softmax(-1)[rows]
    asked, likeliest = predictor_of().logprobs_of(logits, rows, tokens)
    torch.testing.assert_close(asked, logprobs[range(30), tokens])
    torch.testing.assert_close(likeliest, logprobs.amax(-1))


@pytest.mark.parametrize(
    ("family", "rows"), [("llada", [8, 6, 4, 2] * 2), ("dream", [1, 7, 5, 3] * 2)]
)
def test_logits_are_made_for_the_masked_positions_of_the_block_alone(
    engines, request, monkeypatch, family, rows
):
    """What may be unmasked in the current block, and nothing at a finished one.
    (Dream's first step of a block is about its first position.)"""
    llm = engines(request.getfixturevalue(f"tiny_{family}"), cache_method="dllm_cache")
    predictor, found = runner_of(llm).rank.predictor, []
    compute = predictor.compute_logits
    monkeypatch.setattr(
        predictor,
        "compute_logits",
        lambda hidden: found.append(len(hidden)) or compute(hidden),
    )
    generate(
        llm,
        [[3, 1, 4, 1, 5]],
        DiffusionParams(gen_length=16, block_length=8, steps=8, ignore_eos=True),
    )
    assert found == rows


@pytest.mark.parametrize("first", [0, 50])
def test_the_best_token_of_a_class_is_of_that_class_whatever_its_score(first):
    """``first``: of a shard, which holds no token of some class."""
    scores = random_logits(4)[:, first:]
    class_of = (torch.arange(VOCAB) // 50)[first:]
    scores[1] = -torch.inf
    scores[3, 1] = 99
    score, column = best_of_class(
        scores, class_of, torch.tensor([0, 1, 2, -1]), forbidden_token=1
    )
    assert class_of[column[1:3]].tolist() == [1, 2]
    assert score[1] > -torch.inf
    assert score[0] == (scores[0, :50].max() if not first else -torch.inf)
    others = scores[3].clone()
    others[1] = -torch.inf
    assert column[3] == others.argmax(), "any class, without the forbidden token"
