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
    GREEDY,
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


SETTINGS = [
    GREEDY,
    SamplingSettings(1.0, 1.0, 0, False),
    SamplingSettings(0.7, 1.0, 0, True),
    SamplingSettings(0.0, 0.9, 0, True),
    SamplingSettings(0.0, 1.0, 7, True),
    SamplingSettings(0.8, 0.9, 20, True),
    SamplingSettings(0.8, 0.9, 20, False),
    SamplingSettings(0.0, 1.0, 0, False, LAST := frozenset({3, 10, 148})),
    SamplingSettings(0.8, 0.9, 20, True, LAST),
]
STATISTICS = ("token", "probability", "negative_entropy", "margin")


def assert_same(got, expected, *names: str) -> None:
    for name in names:
        torch.testing.assert_close(getattr(got, name), getattr(expected, name))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rows_at_once", [0, 1, 4, 100])
def test_chunks_change_nothing_and_bound_the_logits(
    monkeypatch, settings, rows_at_once
):
    logits, predictor, sizes = random_logits(), predictor_of(), []
    logits[3, [10, 140, 149]] = 25.0  # of equal tokens the lowest is taken
    whole = predict(logits, settings)
    compute = predictor.compute_logits
    predictor.compute_logits = lambda rows: sizes.append(len(rows)) or compute(rows)
    monkeypatch.setattr(
        head_chunks, "MAX_LOGITS_PER_CHUNK", rows_at_once * VOCAB + VOCAB - 1
    )
    got = predict(logits, settings, predictor=predictor)
    assert_same(got, whole, *STATISTICS)
    assert_same(got.logprobs, whole.logprobs, "token", "top", "rank")
    assert torch.equal(got.logprobs.top_tokens[6:], whole.logprobs.top_tokens[6:]), (
        "the first rows hold ties"
    )
    assert max(sizes) == min(max(rows_at_once, 1), 9)
    tokens = torch.tensor([0, 149, MASK, 7, 99, 100, 101, 3, 3])
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    rows = torch.arange(9)
    both = predictor.logprobs_of(logits, rows, tokens)
    torch.testing.assert_close(
        both, torch.stack([expected, logits.float().log_softmax(dim=-1).amax(dim=-1)])
    )
    # A row may be asked about several tokens, in any order.
    rows, order = rows.repeat_interleave(2), torch.randperm(18)
    twice = predictor.logprobs_of(
        logits, rows[order], tokens.repeat_interleave(2)[order]
    )
    assert torch.equal(twice, both.repeat_interleave(2, dim=1)[:, order])


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_probability_is_a_number_just_where_the_logits_are(settings):
    """Minus infinity is one: such a token is never drawn."""
    logits = random_logits(6)
    logits[0, 7] = torch.nan
    logits[1, VOCAB - 1] = torch.inf
    logits[2, :] = torch.nan
    logits[3, 3:100] = -torch.inf
    logits[4, MASK] = torch.inf
    found = predict(logits, settings)
    is_number = found.probability < torch.inf
    assert is_number.nonzero()[:, 0].tolist() == [3, 5]


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
