"""Scorers, whose votes ``tests/methods`` compares with those of plain attention."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dllm_engine.kernels.paged_attention import attention_with_lse
from dllm_engine.model_executor.retention.scorers import SCORERS, ScoredLayer
from dllm_engine.scheduler.request import Span

LENGTH, PROMPT, HEAD_DIM = 30, 18, 8
BLOCK = Span(18, 24)


def layer_of(num_heads: int, num_kv_heads: int) -> ScoredLayer:
    draw = torch.Generator().manual_seed(num_heads)
    q = torch.randn(LENGTH, num_heads, HEAD_DIM, generator=draw) * 2
    k = torch.randn(LENGTH, num_kv_heads, HEAD_DIM, generator=draw)
    known = np.zeros(LENGTH, dtype=np.int64)
    known[[19, 20, 22, *range(24, 30)]] = -1
    lse = attention_with_lse(q, k, torch.zeros_like(k), [0, LENGTH])[1]
    canvas = SimpleNamespace(known=known, seed=11, spec=SimpleNamespace(prompt_length=PROMPT))
    return ScoredLayer(q, k, lse, canvas, BLOCK, layer=3, first_kv_head=0, observation_window=5)


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
    of_block = layer.q[slice(*BLOCK)].double().mean(dim=0)
    expected = []
    for g in range(kv_heads):
        mean = of_block[[h for h in range(num_heads) if h * kv_heads // num_heads == g]].mean(dim=0)
        expected.append((layer.k[tokens, g].double() @ mean / HEAD_DIM**0.5).softmax(-1))
    scores = SCORERS["mean_query"].score(layer, tokens)
    torch.testing.assert_close(scores, torch.stack(expected).float())
    torch.testing.assert_close(scores.sum(dim=1), torch.ones(kv_heads))


def test_scores_of_heads_on_a_rank_are_those_of_the_whole_model():
    layer = layer_of(4, 4)
    rank = dataclasses.replace(layer, q=layer.q[:, 2:], k=layer.k[:, 2:], lse=layer.lse[:, 2:], first_kv_head=2)
    for name, scorer in SCORERS.items():
        torch.testing.assert_close(scorer.score(rank, TOKENS[0]), scorer.score(layer, TOKENS[0])[2:], msg=name)
