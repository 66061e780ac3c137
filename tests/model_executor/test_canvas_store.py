"""Canvases side by side on the device."""

import torch

from dllm_engine.model_executor.canvas_store import CanvasStore
from dllm_engine.model_executor.step_batch import Canvas
from dllm_engine.model_executor.token_prediction import SamplingSettings
from dllm_engine.scheduler.request import DecodingSpec


def add(store: CanvasStore, number: int, length: int, others: list[Canvas]) -> Canvas:
    """A canvas full of its own number."""
    spec = DecodingSpec(1, length - 1, 4, length - 1, "uniform", "low_confidence", 0.0, 1.0, 0)
    canvas = Canvas(spec, 0, SamplingSettings(0.0, 1.0, 0, False))
    store.add(canvas, others)
    canvas.tokens[:], canvas.masked[:] = number, number % 2 == 0
    return canvas


def test_canvases_stay_what_they_are_while_others_come_and_go():
    store = CanvasStore(torch.device("cpu"))
    live: dict[int, Canvas] = {}
    for number in range(60):
        live[number] = add(store, number, 5 + number % 7, list(live.values()))
        if number % 3 == 2:
            live.pop(number - number % 5, None)
        for other, canvas in live.items():
            part = slice(canvas.start, canvas.start + canvas.spec.canvas_length)
            assert canvas.tokens.tolist() == store.tokens[part].tolist() == [other] * (5 + other % 7)
            assert canvas.masked.tolist() == store.masked[part].tolist() == [other % 2 == 0] * (5 + other % 7)


def test_what_finished_requests_held_is_used_again():
    store = CanvasStore(torch.device("cpu"))
    for number in range(50):
        add(store, number, 10, [])
    assert store.tokens.numel() == 20
