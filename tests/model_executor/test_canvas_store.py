"""Canvases side by side on the device."""

import pytest
import torch

from dllm_engine.model_executor import canvas_store
from dllm_engine.model_executor.canvas_store import CanvasStore
from dllm_engine.scheduler.messages import NewRequest
from dllm_engine.scheduler.request import DecodingSpec


@pytest.fixture
def store(monkeypatch) -> CanvasStore:
    """With room for 15 positions."""
    monkeypatch.setattr(canvas_store, "ROOM", 15)
    return CanvasStore(torch.device("cpu"), mask_token_id=99)


def add(store: CanvasStore, number: int, length: int) -> None:
    """A canvas full of its own number."""
    spec = DecodingSpec(1, length - 1, 4, length - 1, "uniform", "low_confidence", 0.0, 1.0, 0)
    store.open(str(number), NewRequest([5], spec, seed=7))
    canvas = store.canvases[str(number)]
    canvas.tokens[:], canvas.masked[:] = number, number % 2 == 0


def test_canvases_stay_what_they_are_while_others_come_and_go(store):
    for number in range(60):
        add(store, number, 5 + number % 7)
        if number % 3 == 2:
            store.close(str(number - number % 5))
        for name, canvas in store.canvases.items():
            other, part = int(name), slice(canvas.start, canvas.start + canvas.spec.canvas_length)
            assert canvas.tokens.tolist() == store.tokens[part].tolist() == [other] * (5 + other % 7)
            assert canvas.masked.tolist() == store.masked[part].tolist() == [other % 2 == 0] * (5 + other % 7)


def test_canvases_close_ranks_in_the_same_tensors(store):
    tokens = store.tokens
    for number in range(50):
        add(store, number, 3)
        store.close(str(number - 1))
        assert store.canvases[str(number)].tokens.tolist() == [number] * 3
    assert store.tokens is tokens
