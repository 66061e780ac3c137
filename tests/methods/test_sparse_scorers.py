"""``sparse`` with scorers other than its paper's."""

import random
from typing import Any

import pytest
import torch

from tests.oracles.dllm_cache import DllmCacheModel
from tests.oracles.models import PlainModel
from tests.support.engines import assert_nothing_left, generate

MODELS = ["llada-tiny-a", "dream-tiny-a"]
SCORERS = ["mean_query", "mask_voting", "snapkv", "random"]


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(480) for _ in range(length)]


@pytest.fixture
def ask(engines, reference_checkpoints):
    from dllm_engine import DiffusionParams

    def answer(model, length, *, gen_length=24, block_length=8, seed=0, **options: Any):
        llm = engines(
            reference_checkpoints / model,
            page_size=8,
            max_model_len=128,
            cache_method="sparse",
            cache_options={"retention_ratio": 0.4} | options,
        )
        params = DiffusionParams(
            gen_length=gen_length, block_length=block_length, steps=gen_length, seed=seed, ignore_eos=True
        )
        (output,) = generate(llm, [prompt(length)], params)
        assert_nothing_left(llm)
        return output.outputs[0]

    return answer


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("model", MODELS)
def test_every_scorer_retains_its_share_of_the_candidates(ask, model, scorer):
    output = ask(model, 37, scorer=scorer)
    assert len(output.token_ids) == 24
    retained = output.diffusion.retained_positions
    assert len(retained) == 3
    for block, layers in enumerate(retained):
        outside = set(range(61)) - set(range(37 + 8 * block, 45 + 8 * block))
        assert len(layers) == 4
        for positions in layers:
            assert len(positions) == int(53 * 0.4)
            assert positions == sorted(set(positions))
            assert set(positions) <= outside


def test_scorers_disagree(ask):
    retained = {scorer: ask("llada-tiny-a", 37, scorer=scorer).diffusion.retained_positions[0] for scorer in SCORERS}
    assert len({str(layers) for layers in retained.values()}) == len(SCORERS)


def test_the_papers_scorer_is_the_default(ask):
    named, default = ask("llada-tiny-a", 37, scorer="mean_query"), ask("llada-tiny-a", 37)
    assert named.diffusion.trace == default.diffusion.trace
    assert named.token_ids == default.token_ids


def test_random_retention_follows_the_seed(ask):
    first, again, other = (
        ask("llada-tiny-a", 37, scorer="random", seed=seed).diffusion.retained_positions for seed in (1, 1, 2)
    )
    assert first == again != other


class Watched(DllmCacheModel):
    """Runs once without a cache, and keeps each layer's attention, averaged over heads: ``[canvas, canvas]``."""

    def __init__(self, model: PlainModel) -> None:
        super().__init__(
            model,
            1,
            prompt_refresh_interval=1,
            response_refresh_interval=1,
            update_ratio=0.0,
            first_layer_always=False,
            adapt_beside_prompt=False,
        )
        self.attention: list[torch.Tensor] = []

    def after_layer(self, number, q, cache):
        of_heads = []
        for h in range(self.heads):
            k = cache.k[:, h * self.kv_heads // self.heads]
            of_heads.append((q[:, h] @ k.T / q.shape[-1] ** 0.5).softmax(-1))
        self.attention.append(torch.stack(of_heads).mean(0))


def pooled(scores: torch.Tensor, width: int) -> list[float]:
    """The highest of each score's neighbours, itself included."""
    half, of_all = width // 2, scores.tolist()
    return [max(of_all[max(i - half, 0) : i + half + 1]) for i in range(len(of_all))]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("scorer", "voters"),
    # In the first step, without a delay, all of the response is masked.
    [("mask_voting", range(37, 61)), ("snapkv", range(37 - 6, 37))],
)
@pytest.mark.parametrize("model", MODELS)
def test_votes_are_those_of_plain_attention(ask, reference_checkpoints, model, scorer, voters, width):
    plain = Watched(PlainModel(reference_checkpoints / model))
    plain.logits(prompt(37) + [plain.mask] * 24)
    output = ask(
        model, 37, scorer=scorer, update_delay=0, pool_kernel_size=width, observation_window=6, retention_ratio=0.4
    )
    for attention, retained in zip(plain.attention, output.diffusion.retained_positions[0], strict=True):
        outside = [*range(37), *range(45, 61)]
        scores = dict(zip(outside, pooled(attention[list(voters)].sum(0)[outside], width), strict=True))
        best = sorted(scores.values(), reverse=True)[: int(53 * 0.4)]
        # Pooling makes neighbours equal, also where the best end: the scores tell, not the positions.
        assert sorted((scores[position] for position in retained), reverse=True) == pytest.approx(best, rel=1e-4)
        if width == 1:
            assert set(retained) == {position for position in outside if scores[position] >= best[-1] * (1 - 1e-6)}
