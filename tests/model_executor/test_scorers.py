"""Scorers, whose votes ``tests/methods`` compares with those of plain attention."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dllm_engine.kernels.paged_attention import attention_with_lse
from dllm_engine.model_executor.retention import scorers
from dllm_engine.model_executor.retention.scorers import SCORERS, ScoredLayer

LENGTH, PROMPT, HEAD_DIM = 30, 18, 8
BLOCK = slice(18, 24)


def layer_of(num_heads=4, num_kv_heads=2, **changes) -> ScoredLayer:
    draw = torch.Generator().manual_seed(num_heads)
    q = torch.randn(LENGTH, num_heads, HEAD_DIM, generator=draw) * 2
    k = torch.randn(LENGTH, num_kv_heads, HEAD_DIM, generator=draw)
    masked = np.zeros(LENGTH, dtype=bool)
    masked[[19, 20, 22, *range(24, 30)]] = True
    fields = {
        "q": q,
        "k": k,
        "lse": attention_with_lse(q, k, torch.zeros_like(k), [0, LENGTH])[1],
        "masked": masked,
        "window": BLOCK,
        "prompt_length": PROMPT,
        "seed": 11,
        "layer": 3,
        "first_kv_head": 0,
        "observation_window": 5,
    }
    return ScoredLayer(**(fields | changes))


HEADS = [(4, 4), (4, 2), (6, 2), (4, 1)]
TOKENS = [
    torch.arange(PROMPT),
    torch.cat((torch.arange(BLOCK.start), torch.arange(BLOCK.stop, LENGTH))),
    torch.tensor([3, 7, 25]),
]


@pytest.mark.parametrize("tokens", TOKENS, ids=["prompt", "outside", "some"])
@pytest.mark.parametrize("heads", HEADS)
def test_mean_query_is_a_softmax_over_the_tokens(heads, tokens):
    layer = layer_of(*heads)
    num_heads, kv_heads = heads
    of_block = layer.q[BLOCK].double().mean(dim=0)
    expected = []
    for g in range(kv_heads):
        mean = of_block[[h for h in range(num_heads) if h * kv_heads // num_heads == g]].mean(dim=0)
        expected.append((layer.k[tokens, g].double() @ mean / HEAD_DIM**0.5).softmax(-1))
    scores = SCORERS["mean_query"].score(layer, tokens)
    torch.testing.assert_close(scores, torch.stack(expected).float())
    torch.testing.assert_close(scores.sum(dim=1), torch.ones(kv_heads))


def test_random_is_noise_of_seed_layer_head_and_position():
    layer = layer_of()
    tokens = TOKENS[1]
    score = SCORERS["random"].score
    drawn = score(layer, tokens)
    assert drawn.shape == (2, len(tokens))
    assert drawn.dtype == torch.float32
    assert (drawn > 0).all()
    assert (drawn < 1).all()
    assert drawn.unique().numel() == drawn.numel()
    assert torch.equal(score(layer, tokens), drawn)
    # A token's number does not depend on who else is scored, nor on queries, keys and masks.
    assert torch.equal(score(layer, tokens[4:7]), drawn[:, 4:7])
    other = dataclasses.replace(layer, q=layer.q + 1, masked=~layer.masked, window=slice(0, 1))
    assert torch.equal(score(other, tokens), drawn)
    for changed in ({"seed": 12}, {"layer": 4}):
        assert not (score(dataclasses.replace(layer, **changed), tokens) == drawn).any()


def test_scores_of_heads_on_a_rank_are_those_of_the_whole_model():
    layer = layer_of(4, 4)
    rank = dataclasses.replace(layer, q=layer.q[:, 2:], k=layer.k[:, 2:], lse=layer.lse[:, 2:], first_kv_head=2)
    for name, scorer in SCORERS.items():
        torch.testing.assert_close(scorer.score(rank, TOKENS[0]), scorer.score(layer, TOKENS[0])[2:], msg=name)


def test_only_scorers_that_say_so_need_the_denominators():
    without = layer_of(lse=None)
    for scorer in SCORERS.values():
        if not scorer.needs_lse:
            scorer.score(without, TOKENS[0])
    assert {name for name, scorer in SCORERS.items() if not scorer.needs_lse} == {"mean_query", "random"}


@pytest.mark.parametrize(
    ("kv_heads", "world", "first_heads"), [(4, 1, [0]), (4, 2, [0, 2]), (4, 4, [0, 1, 2, 3]), (2, 4, [0, 0, 1, 1])]
)
def test_ranks_know_their_first_head(monkeypatch, kv_heads, world, first_heads):
    canvas = SimpleNamespace(known=np.arange(3), spec=SimpleNamespace(prompt_length=2), seed=1)
    plan = SimpleNamespace(window=(2, 3))
    monkeypatch.setattr(scorers, "get_tensor_model_parallel_world_size", lambda: world)
    seen = []
    for rank in range(world):
        monkeypatch.setattr(scorers, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        seen.append(ScoredLayer.of(canvas, plan, torch.empty(0), torch.empty(0), None, 0, kv_heads, 1).first_kv_head)
    assert seen == first_heads
