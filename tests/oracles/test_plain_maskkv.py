"""The plain MaskKV itself: numbers worked out by hand, and cases that other plain code decides."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracles import maskkv as m
from tests.oracles.dllm_cache import plain_dllm_cache, v_verify
from tests.oracles.models import LayerWeights, PlainModel, decode

PROMPT = [(37 * i * i + 11 * i + 5) % 480 for i in range(24)]
SETTINGS: dict[str, Any] = {"gen_length": 16, "block_length": 8, "steps": 8}
REFRESHES: dict[str, Any] = {"prompt_refresh_interval": 6, "response_refresh_interval": 3, "update_ratio": 0.25}
PROFILE = [0.3, 0.1, 0.1, 0.5]


@pytest.fixture(scope="module", params=["llada-tiny-a", "dream-tiny-a"])
def model(request: pytest.FixtureRequest, reference_checkpoints: Path) -> PlainModel:
    torch.set_num_threads(1)
    return PlainModel(reference_checkpoints / request.param)


def test_votes() -> None:
    # Head size 1, so that scores are plain products. The first mask query, 1, weighs the four keys 3:1:1:1, the second,
    # 0, all alike: the prompt's two keys get 3/6 + 1/4 and 1/6 + 1/4.
    k = torch.tensor([math.log(3), 0, 0, 0]).view(4, 1, 1)
    q = torch.tensor([1.0, 0.0]).view(2, 1, 1)
    torch.testing.assert_close(m.mask_votes(q, k, 2), torch.tensor([[3 / 4, 5 / 12]]))


def test_votes_of_grouped_heads_are_averaged() -> None:
    # A second query head without an opinion gives 2/4 to every key: the averages are 5/8 and 11/24.
    k = torch.tensor([math.log(3), 0, 0, 0]).view(4, 1, 1)
    q = torch.tensor([[1.0, 0.0], [0.0, 0.0]]).view(2, 2, 1)
    torch.testing.assert_close(m.mask_votes(q, k, 2), torch.tensor([[5 / 8, 11 / 24]]))
    # The other way round: two KV heads, each with a query head of its own.
    k = torch.cat([k, torch.zeros(4, 1, 1)], dim=1)
    expected = torch.tensor([[3 / 4, 5 / 12], [2 / 4, 2 / 4]])
    torch.testing.assert_close(m.mask_votes(q, k, 2), expected)
    # Two query heads for each of the two: neighbours share one.
    torch.testing.assert_close(m.mask_votes(q.repeat_interleave(2, dim=1), k, 2), expected)


def test_lowest_of_equal_votes_is_kept() -> None:
    assert m.keep_top(torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0]), 3) == [1, 2, 3]
    assert m.keep_top(torch.tensor([1.0, 3.0]), 0) == []


def test_pooled_votes() -> None:
    votes = torch.tensor([[1.0, 0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 3.0]])
    assert m.pooled(votes, 1).tolist() == votes.tolist()
    assert m.pooled(votes, 3).tolist() == [[1, 1, 2, 2, 2], [0, 0, 0, 3, 3]]
    assert m.pooled(votes, 9).tolist() == [[2] * 5, [3] * 5], "wider than the prompt"


def test_layer_importance() -> None:
    # Cosines 1 / sqrt(2) and 1.
    h_in, h_out = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[1.0, 1.0], [0.0, 5.0]])
    assert m.layer_importance(h_in, h_out) == pytest.approx(1 - (1 / math.sqrt(2) + 1) / 2)


def test_layer_budgets() -> None:
    # Base floor(0.4 * 10) = 4, pool 6 * 4 = 24; the boundary's 0.8 of all importance earn floor(19.2) = 19, 9 each, and
    # the middle the 5 left, 2 each.
    assert m.layer_budgets(10, PROFILE, 4) == [13, 6, 6, 13]
    # Base 4, pool 5 * 6 = 30; boundary 3 of 9: 10, 5 each; middle 20, 6 each.
    assert m.layer_budgets(10, [1, 1, 2, 3, 2], 5, beta=0.4) == [9, 10, 10, 10, 9]
    # Nothing but the base is certain at beta 1, nothing at all at beta 0.
    assert m.layer_budgets(10, PROFILE, 4, beta=1) == [10, 10, 10, 10]
    assert m.layer_budgets(10, PROFILE, 4, beta=0) == [16, 4, 4, 16]


def test_layer_budgets_that_lose_nothing() -> None:
    # Shares 4 + 19.2 / 2 = 13.6 and 4 + 4.8 / 2 = 6.4: the two tokens that rounding loses go to the boundary.
    assert m.layer_budgets(10, PROFILE, 4, redistribute=True, prompt_length=99) == [14, 6, 6, 14]
    # Capped at 12, the boundary leaves 4 tokens to the middle's 6 each.
    assert m.layer_budgets(10, PROFILE, 4, redistribute=True, prompt_length=12) == [12, 8, 8, 12]


@pytest.mark.parametrize("profile", [None, [0.0] * 4, [0.2] * 4])
def test_uniform_profile(profile: list[float] | None) -> None:
    assert m.layer_budgets(7, profile, 4) == [7] * 4


def test_models_without_a_middle() -> None:
    assert m.layer_budgets(7, [0.5], 1) == [7]
    assert m.layer_budgets(7, [0.5, 0.1], 2) == [7, 7]


def test_head_budgets() -> None:
    # Base floor(0.1 * 10) = 1, pool 9 * 2 = 18, shared 3:1, so 13.5 and 4.5.
    assert m.head_budgets([3, 1], 10, 99) == [14, 5]
    assert m.head_budgets([3, 1], 10, 12) == [12, 5], "a head cannot keep more than there is"
    # Base floor(0.5 * 5) = 2, pool 3 * 4 = 12, shared 1:1:4:2, so 1.5, 1.5, 6, 3.
    assert m.head_budgets([0.5, 0.5, 2, 1], 5, 99, alpha=0.5) == [3, 3, 8, 5]
    assert m.head_budgets([3, 1], 10, 99, kind="uniform") == [10, 10]
    assert m.head_budgets([3, 1], 10, 8, kind="uniform") == [8, 8]


def test_head_budgets_that_lose_nothing() -> None:
    # Both lack half a token; the first head gets the one that is left.
    assert m.head_budgets([3, 1], 10, 99, redistribute=True) == [15, 5]
    assert m.head_budgets([3, 1], 10, 12, redistribute=True) == [12, 8]
    assert m.head_budgets([3, 1], 10, 9, redistribute=True) == [9, 9], "there is not enough to keep"
    # Shares 1.2, 1.7, 7.1 of a total of 10, capped at 5: four tokens to hand on, in turn to the second, the first...
    assert m.largest_remainder([1.2, 1.7, 7.1], 10, 5) == [2, 3, 5]
    assert m.largest_remainder([1.2, 1.7, 7.1], 9, 5) == [2, 2, 5]


@pytest.mark.parametrize("seed", range(20))
def test_sums_of_head_budgets(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    masses = torch.rand(8, generator=draw).pow(4).tolist()
    budget, length = (int(torch.randint(1, 60, (1,), generator=draw)) for _ in range(2))
    floored = m.head_budgets(masses, budget, length)
    exact = m.head_budgets(masses, budget, length, redistribute=True)
    assert sum(exact) == min(budget, length) * 8
    assert max(exact) <= length
    assert sum(floored) <= sum(exact)
    assert all(low <= high for low, high in zip(floored, exact, strict=True)), "only what was lost is handed on"


def test_v_verify() -> None:
    # Cosines 1, 1 / sqrt(2), 0 and 1 again.
    cached = torch.tensor([[1.0, 0.0]] * 4)
    fresh = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    assert v_verify(fresh, cached, 1).rows == [2]
    picked = v_verify(fresh, cached, 2)
    assert picked.rows == [1, 2]
    assert picked.gap == pytest.approx(1 - 1 / math.sqrt(2))
    tied = v_verify(fresh, cached, 3)
    assert tied.rows == [0, 1, 2], "the first of the two that did not turn"
    assert tied.gap == 0
    assert v_verify(fresh, cached, 0).rows == []


@pytest.mark.parametrize("block_length", [8, 16])
def test_refreshing_everything_and_evicting_nothing_is_no_cache(model: PlainModel, block_length: int) -> None:
    settings = SETTINGS | {"block_length": block_length, "unmasking": "entropy" if model.is_dream else "low_confidence"}
    out = m.plain_maskkv(
        model,
        PROMPT,
        **settings,
        prompt_refresh_interval=1,
        response_refresh_interval=1,
        update_ratio=0,
        kv_budget=len(PROMPT),
    )
    expected = decode(model, PROMPT, **settings)
    assert (out["tokens"], out["order"]) == (expected.tokens, expected.order)
    assert out["retained"] == [[list(range(len(PROMPT)))] * model.kv_heads] * 4
    assert out["updated"] == {}


@pytest.mark.parametrize("update_ratio", [0, 0.25])
@pytest.mark.parametrize("first_layer_always", [False, True])
def test_evicting_nothing_is_dllm_cache(model: PlainModel, update_ratio: float, first_layer_always: bool) -> None:
    refreshes = REFRESHES | {"update_ratio": update_ratio, "first_layer_always": first_layer_always}
    out = m.plain_maskkv(model, PROMPT, **SETTINGS, **refreshes, kv_budget=99, profile=PROFILE)
    # The prompt is never due without the response, so that how they differ there does not show.
    expected = plain_dllm_cache(model, PROMPT, **SETTINGS, **refreshes)
    assert {name: out[name] for name in expected} == expected
    assert sorted(out["updated"]) == ([2, 3, 5, 6, 8] if update_ratio else [])


class Masked(PlainModel):
    """Whole forward passes from the second on with the evicted positions masked out of the attention."""

    def __init__(self, model: PlainModel, retained: list[list[list[int]]], prompt_length: int) -> None:
        self.__dict__.update(model.__dict__)
        self.retained, self.prompt_length = retained, prompt_length
        self.attended = 0

    def _attention(self, layer: LayerWeights, y: torch.Tensor) -> torch.Tensor:
        number, forward = self.attended % len(self.layers), self.attended // len(self.layers)
        self.attended += 1
        if forward == 0:
            return super()._attention(layer, y)

        def project(weight: torch.Tensor, bias: torch.Tensor | None, heads: int) -> torch.Tensor:
            return (y @ weight.T + (0 if bias is None else bias)).view(1, len(y), heads, -1)[0]

        q = self._rotate(project(layer.q, layer.q_bias, self.heads))
        group = self.heads // self.kv_heads
        k = self._rotate(project(layer.k, layer.k_bias, self.kv_heads)).repeat_interleave(group, dim=1)
        v = project(layer.v, layer.v_bias, self.kv_heads).repeat_interleave(group, dim=1)
        seen = torch.zeros(self.heads, 1, len(y), dtype=torch.bool)
        seen[:, :, self.prompt_length :] = True
        for h in range(self.heads):
            seen[h, 0, self.retained[number][h // group]] = True
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[None])
        return out[0].transpose(0, 1).flatten(1) @ layer.out.T


@pytest.mark.parametrize("redistribute", [False, True])
def test_eviction_with_refreshes_in_every_pass_is_a_masked_forward(model: PlainModel, redistribute: bool) -> None:
    out = m.plain_maskkv(
        model,
        PROMPT,
        **SETTINGS,
        prompt_refresh_interval=1,
        response_refresh_interval=1,
        update_ratio=0,
        kv_budget=6,
        profile=PROFILE,
        redistribute=redistribute,
    )
    expected = decode(Masked(model, out["retained"], len(PROMPT)), PROMPT, **SETTINGS, unmasking="low_confidence")
    assert (out["tokens"], out["order"]) == (expected.tokens, expected.order)
    assert out["tokens"] != decode(model, PROMPT, **SETTINGS, unmasking="low_confidence").tokens, "eviction matters"


def test_updating_every_row_is_a_response_refresh(model: PlainModel) -> None:
    budget: dict[str, Any] = {"kv_budget": 6, "profile": PROFILE, "prompt_refresh_interval": 99}
    updated = m.plain_maskkv(model, PROMPT, **SETTINGS, **budget, response_refresh_interval=99, update_ratio=1)
    refreshed = m.plain_maskkv(model, PROMPT, **SETTINGS, **budget, response_refresh_interval=1, update_ratio=0)
    assert (updated["tokens"], updated["order"]) == (refreshed["tokens"], refreshed["order"])


def test_what_an_adaptive_update_leaves_behind(model: PlainModel) -> None:
    """In the first layer, whose keys and values follow from the tokens: of two decoded rows one is picked."""
    cached = m.MaskKVModel(
        model,
        len(PROMPT),
        budgets=[6] * 4,
        head_budget="uniform",
        alpha=0.1,
        redistribute=False,
        pool_kernel_size=1,
        prompt_refresh_interval=99,
        response_refresh_interval=99,
        update_ratio=0.125,
        first_layer_always=False,
    )
    before = PROMPT + [model.mask] * 8
    after = before.copy()
    after[26], after[29] = 17, 333
    first = cached.predictions(before)
    cache = cached.caches[0]
    old_k, old_attn = cache.k.clone(), cache.attn.clone()
    second = cached.predictions(after)

    ((picked,), other) = cached.updated[2][0], {26: 29, 29: 26}[cached.updated[2][0][0]]
    layer = model.layers[0]
    _, k, v = cached.project(layer, model._rms(model.embedding[torch.tensor(after)], layer.attn_norm))
    torch.testing.assert_close(cache.v[24:], v[24:], rtol=0, atol=0)
    torch.testing.assert_close(cache.k[picked], k[picked], rtol=0, atol=0)
    untouched = [position for position in range(24, 32) if position != picked]
    torch.testing.assert_close(cache.k[untouched], old_k[untouched], rtol=0, atol=0)
    assert not torch.equal(cache.k[other], k[other]), "the key of the mask"
    torch.testing.assert_close(cache.attn[untouched], old_attn[untouched], rtol=0, atol=0)
    assert not torch.equal(cache.attn[picked], old_attn[picked])
    for g, kept in enumerate(cached.retained[0]):
        known = ~cache.k[:24, g].isnan().any(-1)
        assert known.nonzero().flatten().tolist() == kept

    # Nothing is known of the prompt's outputs, but for Dream's last row: it is as it was, and predicts position 24.
    assert first[:24].isfinite().all()
    assert second[1 if model.is_dream else 0 : 24].isnan().all()
    assert second[24:].isfinite().all()
    if model.is_dream:
        torch.testing.assert_close(second[24], first[24])


def test_refresh_of_the_prompt_alone_reuses_the_response(model: PlainModel) -> None:
    # Passes 3 and 7 refresh only the prompt, 1, 5 and 9 both.
    out = m.plain_maskkv(
        model,
        PROMPT,
        **(SETTINGS | {"steps": 10}),
        prompt_refresh_interval=2,
        response_refresh_interval=4,
        update_ratio=0.25,
        kv_budget=6,
        profile=PROFILE,
    )
    assert sorted(out["updated"]) == [2, 4, 6, 8, 10]
    assert all(len(rows) == 4 for layers in out["updated"].values() for rows in layers.values())


def test_what_is_reported(model: PlainModel) -> None:
    out = m.plain_maskkv(model, PROMPT, **SETTINGS, **REFRESHES, kv_budget=6, profile=PROFILE)
    # Base 2, pool 16: boundary floor(12.8) = 12, 6 each; middle 4, 2 each.
    assert out["layer_budgets"] == [8, 4, 4, 8]
    for budget, keep, retained in zip(out["layer_budgets"], out["head_budgets"], out["retained"], strict=True):
        assert [len(kept) for kept in retained] == keep
        assert sum(keep) <= budget * model.kv_heads
        assert all(kept == sorted(set(kept)) and set(kept) <= set(range(len(PROMPT))) for kept in retained)
    assert sum(len(step) for step in out["order"]) == 16
    assert model.mask not in out["tokens"]
    assert sorted(out["updated"]) == [2, 3, 5, 6, 8]
    assert all(list(layers) == [0, 1, 2, 3] for layers in out["updated"].values())
    uniform = m.plain_maskkv(
        model, PROMPT, **SETTINGS, **REFRESHES, kv_budget=6, layer_budget="uniform", head_budget="uniform"
    )
    assert uniform["head_budgets"] == [[6] * model.kv_heads] * 4


def test_heads_without_a_budget_see_only_the_response(model: PlainModel) -> None:
    out = m.plain_maskkv(model, PROMPT, **SETTINGS, **REFRESHES, kv_budget=0)
    assert out["retained"] == [[[]] * model.kv_heads] * 4
    assert model.mask not in out["tokens"]
