"""The plain FreeCache itself: schedules worked out by hand, and cases that other plain code decides."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracles.dllm_cache import plain_dllm_cache
from tests.oracles.freecache import plain_freecache
from tests.oracles.maskkv import plain_maskkv
from tests.oracles.models import PlainModel, decode
from tests.support.reference_cases import Case, reference_cases
from tests.support.tiny_checkpoints import write_dream, write_llada

PROMPT = [(29 * i * i + 7 * i + 3) % 480 for i in range(12)]
PREFIX_CASES = [
    case
    for family in ("llada", "dream")
    for case in reference_cases(f"fast_dllm_{family}")
    if case["hyperparameters"]["cache"] == "prefix"
    and case["num_forward_passes"] <= 32  # the short ones
    and len(case["prompt_ids"][0]) <= 64
]


@pytest.fixture(scope="module", params=["llada-tiny-a", "dream-tiny-a"])
def model(request: pytest.FixtureRequest, reference_checkpoints: Path) -> PlainModel:
    torch.set_num_threads(1)
    return PlainModel(reference_checkpoints / request.param)


@pytest.fixture(scope="module", params=["llada", "dream"])
def shallow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlainModel:
    """One layer: its keys and values depend on nothing but their own token, so no cache of clean tokens goes stale."""
    folder = tmp_path_factory.mktemp("shallow")
    if request.param == "llada":
        return PlainModel(write_llada(folder, n_layers=1))
    return PlainModel(write_dream(folder, num_hidden_layers=1))


def test_how_many_positions_a_pass_fills(model: PlainModel) -> None:
    sizes = [len(step) for step in plain_freecache(model, PROMPT, gen_length=8, block_length=8, steps=4)["order"]]
    if model.is_dream:
        # The first position alone. T = 1, 0.75025, 0.5005, 0.25075, 0.001 then takes int(7 * (1 - 0.5005 / 0.75025)) =
        # int(2.33) of the other seven and int(5 * (1 - 0.25075 / 0.5005)) = int(2.495) of five; the last pass the rest.
        assert sizes == [1, 2, 2, 3]
    else:
        assert sizes == [2, 2, 2, 2]
        three = plain_freecache(model, PROMPT, gen_length=8, block_length=8, steps=3)
        assert [len(step) for step in three["order"]] == [3, 3, 2]


@pytest.mark.parametrize("include_suffix", [True, False])
def test_which_positions_a_pass_computes(model: PlainModel, include_suffix: bool) -> None:
    # Prompt 0-11, blocks 12-15, 16-19, 20-22; seven steps are 3, 2 and 2.
    settings: dict[str, Any] = {"gen_length": 11, "block_length": 4, "steps": 7, "include_suffix": include_suffix}
    ends = [23, 23, 23] if include_suffix else [16, 20, 23]
    expected = [
        range(23),
        *[range(12, ends[0])] * 2,
        range(12, ends[1]),
        range(16, ends[1]),
        range(16, ends[2]),
        range(20, ends[2]),
    ]
    out = plain_freecache(model, PROMPT, **settings)
    assert out["computed"] == [list(positions) for positions in expected]
    assert len(out["order"]) == 7
    narrow = plain_freecache(model, PROMPT, **settings, first_forward_whole=False)
    assert narrow["computed"] == [list(range(ends[0])), *out["computed"][1:]]


def test_dream_fills_only_the_first_position_of_a_block_at_first(reference_checkpoints: Path) -> None:
    dream = PlainModel(reference_checkpoints / "dream-tiny-a")
    out = plain_freecache(dream, PROMPT, gen_length=16, block_length=8, steps=16)
    assert [out["order"][i] for i in (0, 8)] == [[12], [20]]
    out = plain_freecache(dream, PROMPT, gen_length=16, block_length=8, threshold=0.0)
    assert out["order"] == [[12], list(range(13, 20)), [20], list(range(21, 28))]


@pytest.mark.parametrize("case", PREFIX_CASES, ids=lambda case: case["name"])
def test_first_block_is_the_prefix_cache(case: Case, reference_checkpoints: Path) -> None:
    """Until the first block is done, both keep the prompt's keys and values of the first pass, and nothing else."""
    torch.set_num_threads(1)
    model = PlainModel(reference_checkpoints / case["model"])
    h = case["hyperparameters"]
    by_threshold = h["threshold"] is not None and h.get("alg", "confidence_threshold") == "confidence_threshold"
    prompt = case["prompt_ids"][0]
    first, end = len(prompt), len(prompt) + h["block_length"]
    out = plain_freecache(
        model,
        prompt,
        gen_length=h["gen_length"],
        block_length=h["block_length"],
        steps=None if by_threshold else h["steps"],
        threshold=h["threshold"] if by_threshold else None,
        unmasking="entropy" if h.get("alg") == "entropy" else "low_confidence",
    )
    expected = [step[0] for step in case["unmasked_per_step"]]
    passes = 1 + max(i for i, step in enumerate(expected) if step and step[0] < end)
    assert out["order"][:passes] == [sorted(step) for step in expected[:passes]]
    assert out["tokens"][: end - first] == case["output_ids"][0][first:end]


@pytest.mark.parametrize("how", [{"steps": 12}, {"steps": 3}, {"steps": 24}])
def test_one_layer_is_no_cache(shallow: PlainModel, how: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"gen_length": 24, "block_length": 8, **how}
    unmasking = "entropy" if shallow.is_dream else "low_confidence"
    out = plain_freecache(shallow, [3, 1, 4, 1, 5, 9], **settings, unmasking=unmasking)
    expected = decode(shallow, [3, 1, 4, 1, 5, 9], **settings, unmasking=unmasking)
    assert (out["tokens"], out["order"]) == (expected.tokens, expected.order)


def test_one_layer_without_suffix_appends_blocks(shallow: PlainModel) -> None:
    out = plain_freecache(
        shallow,
        [3, 1, 4, 1, 5, 9],
        gen_length=24,
        block_length=8,
        steps=24,
        include_suffix=False,
        first_forward_whole=False,
    )
    prompt, canvas = [3, 1, 4, 1, 5, 9], [3, 1, 4, 1, 5, 9]
    for _ in range(3):
        if shallow.is_dream:  # in a single block `decode` has no block rule
            raw = shallow.logits(canvas + [shallow.mask] * 8)
            first = [*canvas, int(raw[len(canvas) - 1].argmax())]
            canvas = _finish_dream_block(shallow, first, 7, 8)
        else:
            canvas = (
                canvas
                + decode(shallow, canvas, gen_length=8, block_length=8, steps=8, unmasking="low_confidence").tokens
            )
    assert out["tokens"] == canvas[len(prompt) :]


def _finish_dream_block(model: PlainModel, canvas: list[int], left: int, steps: int) -> list[int]:
    canvas = canvas + [model.mask] * left
    t = torch.linspace(1, 1e-3, steps + 1)
    for step in range(1, steps):
        rows = model.predictions(canvas)
        masked = [i for i, token in enumerate(canvas) if token == model.mask]
        masked.sort(key=lambda i: -float(rows[i].softmax(-1).max()))
        count = len(masked) if step == steps - 1 else int(len(masked) * (1 - t[step + 1] / t[step]))
        for i in masked[:count]:
            canvas[i] = int(rows[i].argmax())
    return canvas


@pytest.mark.parametrize("include_suffix", [True, False])
def test_one_block_is_a_prompt_that_is_never_refreshed(reference_checkpoints: Path, include_suffix: bool) -> None:
    llada = PlainModel(reference_checkpoints / "llada-tiny-a")
    settings: dict[str, Any] = {"gen_length": 16, "block_length": 16, "steps": 16}
    refreshes: dict[str, Any] = {"prompt_refresh_interval": 99, "response_refresh_interval": 1, "update_ratio": 0}
    out = plain_freecache(llada, PROMPT, **settings, include_suffix=include_suffix)
    for expected in (
        plain_dllm_cache(llada, PROMPT, **settings, **refreshes),
        plain_dllm_cache(llada, PROMPT, **settings, **refreshes, first_layer_always=False),
        plain_maskkv(llada, PROMPT, **settings, **refreshes, kv_budget=len(PROMPT)),
    ):
        assert (out["tokens"], out["order"]) == (expected["tokens"], expected["order"])


class Patched(PlainModel):
    """Whole forward passes in which clean positions have the keys and values they had in an earlier pass."""

    def __init__(self, model: PlainModel) -> None:
        self.__dict__.update(model.__dict__)
        self.clean: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in model.layers]

    def run(self, canvas: list[int], fed: list[int], cleaned: list[int]) -> torch.Tensor:
        x = self.embedding[torch.tensor(canvas)]
        for clean, layer in zip(self.clean, self.layers, strict=True):
            y = self._rms(x, layer.attn_norm)
            q, k, v = (
                (y @ weight.T + (0 if bias is None else bias)).unflatten(-1, (heads, -1))
                for weight, bias, heads in (
                    (layer.q, layer.q_bias, self.heads),
                    (layer.k, layer.k_bias, self.kv_heads),
                    (layer.v, layer.v_bias, self.kv_heads),
                )
            )
            q, k = self._rotate(q), self._rotate(k)
            fresh = {position: (k[position].clone(), v[position].clone()) for position in cleaned}
            for position, (old_k, old_v) in clean.items():
                k[position], v[position] = old_k, old_v
            clean.update(fresh)
            seen = torch.full((len(canvas),), -math.inf)
            seen[[*clean, *fed]] = 0
            group = self.heads // self.kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1]) + seen
            x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ layer.out.T
            y = self._rms(x, layer.mlp_norm)
            x = x + (torch.nn.functional.silu(y @ layer.gate.T) * (y @ layer.up.T)) @ layer.down.T
        raw = self._rms(x, self.norm) @ self.head.T
        return torch.cat([raw[:1], raw[:-1]]) if self.is_dream else raw


@pytest.mark.parametrize("include_suffix", [True, False])
def test_every_choice_follows_from_a_patched_forward(model: PlainModel, include_suffix: bool) -> None:
    out = plain_freecache(model, PROMPT, gen_length=24, block_length=8, steps=12, include_suffix=include_suffix)
    canvas = PROMPT + [model.mask] * 24
    patched = Patched(model)
    for number, (fed, filled) in enumerate(zip(out["computed"], out["order"], strict=True)):
        start = 12 + 8 * (number // 4)
        cleaned = list(range(start - 8 if number else 0, start)) if number % 4 == 0 else []
        if number == 0:
            cleaned = list(range(12))
        rows = patched.run(canvas, fed, cleaned)
        confidence = {i: float(rows[i].softmax(-1).max()) for i in range(start, start + 8) if canvas[i] == model.mask}
        if not (model.is_dream and number % 4 == 0):
            assert filled == sorted(sorted(confidence, key=lambda i: -confidence[i])[: len(filled)])
        for i in filled:
            canvas[i] = int(rows[i].argmax())
    assert out["tokens"] == canvas[12:]
    uncached = decode(model, PROMPT, gen_length=24, block_length=8, steps=12, unmasking="low_confidence")
    assert out["tokens"] != uncached.tokens, "the cache matters"


def test_threshold(model: PlainModel) -> None:
    settings: dict[str, Any] = {"gen_length": 16, "block_length": 8}
    one_by_one = plain_freecache(model, PROMPT, **settings, threshold=2.0)
    assert [len(step) for step in one_by_one["order"]] == [1] * 16
    assert one_by_one["tokens"] != plain_freecache(model, PROMPT, **settings, threshold=0.0)["tokens"]
    neither_nor_both: list[dict[str, Any]] = [{}, {"steps": 8, "threshold": 0.5}]
    for how in neither_nor_both:
        with pytest.raises(ValueError):
            plain_freecache(model, PROMPT, **settings, **how)
