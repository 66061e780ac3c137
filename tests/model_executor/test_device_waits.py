"""How often a dispatch waits for the device: once, for what it filled. On a CPU nothing waits; here it is counted."""

import sys
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from dllm_engine import DiffusionParams
from dllm_engine.scheduler.methods import CACHE_METHODS
from tests.support.engines import generate, runner_of
from tests.support.plans import FULL_METHODS, SHORT_INTERVALS

ASKING = ("cpu", "item", "tolist", "nonzero", "bincount", "unique", "masked_select", "repeat_interleave")
CONVERTING = ("__bool__", "__int__", "__float__", "__index__", "__contains__")
WAITING = {getattr(torch.Tensor, name) for name in ASKING + CONVERTING} | {torch.nonzero, torch.bincount, torch.tensor}
"""Functions that bring numbers to the host, or a size, or the host's numbers from memory that a GPU cannot fetch."""
INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
REFRESHES = [
    (name, {"refresh": value}) for name, value in (("dual", "response"), ("dual", "near"), ("sparse", "response"))
]
PROMPTS = [[7 * i % 100 for i in range(1, length)] for length in (14, 10, 6, 14)]


class CountsWaits(TorchFunctionMode):
    """Counts the calls in a file of ``model_executor`` that wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in WAITING or (func in INDEXING and asks_for_a_size(*args)):
            caller = sys._getframe(1)
            if "model_executor" in Path(caller.f_code.co_filename).parts:
                self.calls.append(f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno} {func.__name__}")
        return func(*args, **(kwargs or {}))


def asks_for_a_size(tensor, index, value=None) -> bool:
    """Indexing by a mask, or by a number on the device; a mask that gets one number is filled in place."""
    parts = [part for part in (index if isinstance(index, tuple) else (index,)) if isinstance(part, torch.Tensor)]
    if value is not None and not isinstance(value, torch.Tensor):
        parts = [part for part in parts if part.dtype != torch.bool]
    return any(part.dtype == torch.bool or part.dim() == 0 for part in parts)


@pytest.fixture
def waits(monkeypatch):
    """``waits(llm)``: a list that grows by the calls that waited in each dispatch."""

    def watch(llm):
        runner, of_dispatches = runner_of(llm), []
        execute = runner.execute_model

        def watched(*args, **kwargs):
            with CountsWaits() as counted:
                output = execute(*args, **kwargs)
            of_dispatches.append(counted.calls)
            return output

        monkeypatch.setattr(runner, "execute_model", watched)
        return of_dispatches

    return watch


def asked(**settings):
    return DiffusionParams(**({"gen_length": 12, "block_length": 6, "ignore_eos": True} | settings))


@pytest.mark.parametrize(("method", "options"), [*((n, SHORT_INTERVALS.get(n, {})) for n in CACHE_METHODS), *REFRESHES])
def test_a_dispatch_waits_for_what_it_filled_and_no_more(engines, tiny_dream, tiny_sdar, waits, method, options):
    """Also where blocks end, and in steps that refresh. What the host must know besides comes along: how many slots
    MaskKV needs after a vote, and by what d2Cache chooses rows. The importance of layers MaskKV must know before."""
    model = tiny_dream if method in FULL_METHODS else tiny_sdar
    llm = engines.shared(model, trace=False, cache_method=method, cache_options=options, page_size=8)
    of_dispatches = waits(llm)
    params = [asked(), asked(threshold=0.2), asked(unmasking="entropy"), asked(temperature=0.8, seed=1)]
    generate(llm, PROMPTS, params)
    allowed = {"maskkv": 2}.get(method, 1)
    assert max(map(len, of_dispatches)) == allowed, max(of_dispatches, key=len)


def test_what_waits_is_noticed():
    numbers, counted = torch.arange(4), CountsWaits()
    here = {"__file__": "model_executor/there.py", "x": numbers, "torch": torch}
    for call in ("x.tolist()", "int(x[0])", "x[x > 1]", "x[x[1]]", "torch.tensor([1])", "x.nonzero()", "bool(x.any())"):
        with counted:
            exec(compile(call, here["__file__"], "eval"), here)
    assert len(counted.calls) == 7
    with counted:
        exec(compile("x[1:3] + x[[0, 1]] + x[torch.arange(2)]", here["__file__"], "eval"), here)
    assert len(counted.calls) == 7
