"""The plain versions of methods without reference cases, by what they must equal; the engine is held to all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracles.decode import decode
from tests.oracles.decoding import Decoding
from tests.oracles.models import Layer, PlainModel
from tests.support.tiny_checkpoints import write_dream, write_llada

PROMPT = [(37 * i * i + 11 * i + 5) % 480 for i in range(24)]
ASKED: dict[str, Any] = {"gen_length": 16, "block_length": 8, "steps": 8}


@pytest.fixture(scope="module", params=[write_llada, write_dream])
def shallow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlainModel:
    """One layer: its keys and values depend on nothing but their own token, so no cache of clean tokens goes stale."""
    layers = {"n_layers" if request.param is write_llada else "num_hidden_layers": 1}
    return PlainModel(request.param(tmp_path_factory.mktemp("shallow"), **layers))


def decoded(run: Decoding) -> tuple[list[int], list[list[int]]]:
    return run.tokens, run.order


@pytest.mark.parametrize("steps", [3, 12, 24])
def test_with_one_layer_freecache_is_no_cache(shallow: PlainModel, steps: int) -> None:
    asked = {"gen_length": 24, "block_length": 8, "steps": steps, "unmasking": "maskgit_plus"}
    runs = [decode(shallow, [3, 1, 4, 1, 5, 9], method, **asked) for method in ("freecache", "none")]
    assert decoded(runs[0]) == decoded(runs[1])


class Masked(PlainModel):
    """Whole forward passes from the second on with the evicted positions masked out of the attention."""

    def __init__(self, model: PlainModel, retained: list[list[list[int]]], prompt_length: int) -> None:
        self.__dict__.update(model.__dict__)
        self.retained, self.prompt_length = retained, prompt_length
        self.attended = 0

    def attention(self, layer: Layer, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> Any:
        number, forward = self.attended % len(self.layers), self.attended // len(self.layers)
        self.attended += 1
        response = list(range(self.prompt_length, len(keys)))
        visible = [kept + response for kept in self.retained[number]] if forward > 0 else None
        return super().attention(layer, q, keys, values, visible)


@pytest.mark.parametrize("name", ["llada-tiny-a", "dream-tiny-a"])
def test_eviction_with_refreshes_in_every_pass_is_a_masked_forward(reference_checkpoints: Path, name: str) -> None:
    torch.set_num_threads(1)
    model = PlainModel(reference_checkpoints / name)
    options = {"prompt_refresh_interval": 1, "response_refresh_interval": 1, "update_ratio": 0, "kv_budget": 6}
    run = decode(model, PROMPT, "maskkv", options, **ASKED)
    (retained,) = run.traces["retained_per_head"]
    assert decoded(run) == decoded(decode(Masked(model, retained, len(PROMPT)), PROMPT, **ASKED))
    assert run.tokens != decode(model, PROMPT, **ASKED).tokens, "eviction matters"
