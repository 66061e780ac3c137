"""The plain versions of methods without reference cases: numbers worked out by hand, and one by another."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracles import maskkv as m
from tests.oracles.decode import decode
from tests.oracles.decoding import Decoding
from tests.oracles.dllm_cache import most_changed
from tests.oracles.models import Layer, PlainModel
from tests.support.tiny_checkpoints import write_dream, write_llada

PROMPT = [(37 * i * i + 11 * i + 5) % 480 for i in range(24)]
ASKED: dict[str, Any] = {"gen_length": 16, "block_length": 8, "steps": 8}
REFRESHES: dict[str, Any] = {"prompt_refresh_interval": 6, "response_refresh_interval": 3, "update_ratio": 0.25}
EVERYTHING: dict[str, Any] = {"prompt_refresh_interval": 1, "response_refresh_interval": 1, "update_ratio": 0}
PROFILE = [0.3, 0.1, 0.1, 0.5]


@pytest.fixture(scope="module", params=["llada-tiny-a", "dream-tiny-a"])
def model(request: pytest.FixtureRequest, reference_checkpoints: Path) -> PlainModel:
    torch.set_num_threads(1)
    return PlainModel(reference_checkpoints / request.param)


@pytest.fixture(scope="module", params=[write_llada, write_dream])
def shallow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlainModel:
    """One layer: its keys and values depend on nothing but their own token, so no cache of clean tokens goes stale."""
    layers = {"n_layers" if request.param is write_llada else "num_hidden_layers": 1}
    return PlainModel(request.param(tmp_path_factory.mktemp("shallow"), **layers))


def decoded(run: Decoding) -> tuple[list[int], list[list[int]]]:
    return run.tokens, run.order


# Schedules


def test_how_many_positions_a_pass_fills(model: PlainModel) -> None:
    run = decode(model, PROMPT, "freecache", gen_length=8, block_length=8, steps=4)
    # Dream: the first position alone. T = 1, 0.75025, 0.5005, 0.25075, 0.001 then takes int(7 * (1 - 0.5005 / 0.75025))
    # = int(2.33) of the other seven and int(5 * (1 - 0.25075 / 0.5005)) = int(2.495) of five; the last pass the rest.
    assert [len(step) for step in run.order] == ([1, 2, 2, 3] if model.is_dream else [2, 2, 2, 2])


def test_dream_fills_only_the_first_position_of_a_block_at_first(reference_checkpoints: Path) -> None:
    dream = PlainModel(reference_checkpoints / "dream-tiny-a")
    run = decode(dream, PROMPT[:12], "freecache", gen_length=16, block_length=8, threshold=1e-9)
    assert run.order == [[12], list(range(13, 20)), [20], list(range(21, 28))]


# FreeCache


@pytest.mark.parametrize("include_suffix", [True, False])
def test_which_positions_a_pass_computes(model: PlainModel, include_suffix: bool) -> None:
    # Prompt 0-11, blocks 12-15, 16-19, 20-22; seven steps are 3, 2 and 2.
    ends = [23, 23, 23] if include_suffix else [16, 20, 23]
    expected = [
        range(23),
        *[range(12, ends[0])] * 2,
        range(12, ends[1]),
        range(16, ends[1]),
        range(16, ends[2]),
        range(20, ends[2]),
    ]
    options = {"include_suffix": include_suffix}
    run = decode(model, PROMPT[:12], "freecache", options, gen_length=11, block_length=4, steps=7)
    assert run.computed == [list(positions) for positions in expected]


@pytest.mark.parametrize("steps", [3, 12, 24])
def test_with_one_layer_freecache_is_no_cache(shallow: PlainModel, steps: int) -> None:
    asked = {"gen_length": 24, "block_length": 8, "steps": steps, "unmasking": "maskgit_plus"}
    runs = [decode(shallow, [3, 1, 4, 1, 5, 9], method, **asked) for method in ("freecache", "none")]
    assert decoded(runs[0]) == decoded(runs[1])


@pytest.mark.parametrize("include_suffix", [True, False])
def test_one_block_of_freecache_is_a_prompt_that_is_never_refreshed(
    reference_checkpoints: Path, include_suffix: bool
) -> None:
    llada = PlainModel(reference_checkpoints / "llada-tiny-a")
    asked = {"gen_length": 16, "block_length": 16, "steps": 16}
    never = {"prompt_refresh_interval": 99, "response_refresh_interval": 1, "update_ratio": 0}
    run = decode(llada, PROMPT, "freecache", {"include_suffix": include_suffix}, **asked)
    assert decoded(run) == decoded(decode(llada, PROMPT, "dllm_cache", never, **asked))


# What MaskKV and dLLM-Cache are made of; the budgets are held to hand-made numbers by the engine's own tests


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


def test_most_changed_rows() -> None:
    # Cosines 1, 1 / sqrt(2), 0 and 1 again.
    cached = torch.tensor([[1.0, 0.0]] * 4)
    fresh = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    assert most_changed(fresh, cached, 1)[0] == [2]
    assert most_changed(fresh, cached, 2) == ([1, 2], pytest.approx(1 - 1 / math.sqrt(2)))
    assert most_changed(fresh, cached, 3) == ([0, 1, 2], 0), "the first of the two that did not turn"
    assert most_changed(fresh, cached, 0)[0] == []


# Whole responses


def test_refreshing_everything_and_evicting_nothing_is_no_cache(model: PlainModel) -> None:
    run = decode(model, PROMPT, "maskkv", EVERYTHING | {"kv_budget": len(PROMPT)}, **ASKED)
    assert decoded(run) == decoded(decode(model, PROMPT, **ASKED))
    assert run.traces["retained_per_head"] == [[[list(range(len(PROMPT)))] * model.kv_heads] * 4]
    assert run.traces["updated_positions"] == []


@pytest.mark.parametrize("update_ratio", [0, 0.25])
@pytest.mark.parametrize("first_layer", [False, True])
def test_evicting_nothing_is_dllm_cache(model: PlainModel, update_ratio: float, first_layer: bool) -> None:
    options = REFRESHES | {"update_ratio": update_ratio, "refresh_first_layer": first_layer}
    run = decode(model, PROMPT, "maskkv", options | {"kv_budget": 99, "profile": PROFILE}, **ASKED)
    # The prompt is never due without the response, so that how they differ there does not show.
    other = decode(model, PROMPT, "dllm_cache", options, **ASKED)
    assert decoded(run) == decoded(other)
    assert run.traces["updated_positions"] == other.traces["updated_positions"]
    assert len(run.traces["updated_positions"]) == (5 if update_ratio else 0)


class Masked(PlainModel):
    """Whole forward passes from the second on with the evicted positions masked out of the attention."""

    def __init__(self, model: PlainModel, retained: list[list[list[int]]], prompt_length: int) -> None:
        self.__dict__.update(model.__dict__)
        self.retained, self.prompt_length = retained, prompt_length
        self.attended = 0

    def attention(self, layer: Layer, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> Any:
        number, forward = self.attended % len(self.layers), self.attended // len(self.layers)
        self.attended += 1
        seen = torch.ones(self.heads, 1, len(keys), dtype=torch.bool)
        group = self.heads // self.kv_heads
        if forward > 0:
            seen[:, :, : self.prompt_length] = False
            for h in range(self.heads):
                seen[h, 0, self.retained[number][h // group]] = True
        k, v = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[None])
        return out[0].transpose(0, 1).flatten(1) @ layer.weights["out"].T


@pytest.mark.parametrize("redistribute", [False, True])
def test_eviction_with_refreshes_in_every_pass_is_a_masked_forward(model: PlainModel, redistribute: bool) -> None:
    options = EVERYTHING | {"kv_budget": 6, "profile": PROFILE, "redistribute": redistribute}
    run = decode(model, PROMPT, "maskkv", options, **ASKED)
    (retained,) = run.traces["retained_per_head"]
    assert decoded(run) == decoded(decode(Masked(model, retained, len(PROMPT)), PROMPT, **ASKED))
    assert run.tokens != decode(model, PROMPT, **ASKED).tokens, "eviction matters"


def test_updating_every_row_is_a_response_refresh(model: PlainModel) -> None:
    budget = {"kv_budget": 6, "profile": PROFILE, "prompt_refresh_interval": 99}
    updated = decode(model, PROMPT, "maskkv", budget | {"response_refresh_interval": 99, "update_ratio": 1}, **ASKED)
    refreshed = decode(model, PROMPT, "maskkv", budget | {"response_refresh_interval": 1, "update_ratio": 0}, **ASKED)
    assert decoded(updated) == decoded(refreshed)


def test_what_an_adaptive_update_leaves_behind(model: PlainModel) -> None:
    """In the first layer, whose keys and values follow from the tokens: of two decoded rows one is picked."""
    run = Decoding(model, PROMPT, 8, 8)
    refreshes = {"prompt_refresh_interval": 99, "response_refresh_interval": 99, "update_ratio": 0.125}
    cached = m.MaskKVCache(run, kv_budget=6, head_budget="uniform", **refreshes)
    cached.forward()
    cache = cached.caches[0]
    old_k, old_attn = cache.k.clone(), cache.attn.clone()
    run.canvas[26], run.canvas[29] = 17, 333
    logits, fed = cached.forward()

    ((picked,), *_) = cached.updated[0]
    other = {26: 29, 29: 26}[picked]
    _, k, v = model.qkv(model.layers[0], model.embed(run.canvas), range(32))
    untouched = [position for position in range(24, 32) if position != picked]
    assert torch.equal(cache.v[24:], v[24:])
    assert torch.equal(cache.k[picked], k[picked])
    assert torch.equal(cache.k[untouched], old_k[untouched])
    assert not torch.equal(cache.k[other], k[other]), "the key of the mask"
    assert torch.equal(cache.attn[untouched], old_attn[untouched])
    assert not torch.equal(cache.attn[picked], old_attn[picked])
    for g, kept in enumerate(cached.retained[0]):
        assert (~cache.k[:24, g].isnan().any(-1)).nonzero().flatten().tolist() == kept
    # Nothing is known of the prompt's outputs, but for Dream's last row, which predicts position 24.
    assert fed == range(24 - model.is_dream, 32)
    assert logits.isfinite().all(-1).nonzero().flatten().tolist() == list(fed)


def test_what_is_reported(model: PlainModel) -> None:
    run = decode(model, PROMPT, "maskkv", REFRESHES | {"kv_budget": 6, "profile": PROFILE}, **ASKED)
    # Base 2, pool 16: boundary floor(12.8) = 12, 6 each; middle 4, 2 each.
    for budget, retained in zip([8, 4, 4, 8], run.traces["retained_per_head"][0], strict=True):
        assert budget * model.kv_heads - model.kv_heads < sum(map(len, retained)) <= budget * model.kv_heads
        assert all(kept == sorted(set(kept)) and set(kept) <= set(range(len(PROMPT))) for kept in retained)
    # Passes 2, 3, 5, 6 and 8 adapt, and recompute a quarter of 16 rows in every layer.
    assert [list(map(len, layers)) for layers in run.traces["updated_positions"]] == [[4] * 4] * 5
