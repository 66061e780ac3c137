"""How often a dispatch waits for the device: once, for what it filled; and that
whatever it makes lies there. On a CPU nothing waits and nothing goes wrong where a
tensor names no device; here it is counted, and refused."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from dllm_engine import DiffusionParams
from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.decoding.unmasking_policies import PARALLEL_RULES, UNMASKING_POLICIES
from tests.support.engines import (
    EACH_METHOD_WITH_A_MODEL,
    generate,
    runner_of,
    set_steps_per_dispatch,
)
from tests.support.plans import FULL_METHODS, SHORT_INTERVALS, WAYS

ASKING = (
    "cpu",
    "item",
    "tolist",
    "nonzero",
    "bincount",
    "unique",
    "masked_select",
    "repeat_interleave",
)
CONVERTING = ("__bool__", "__int__", "__float__", "__index__", "__contains__")
WAITING = {getattr(torch.Tensor, name) for name in ASKING + CONVERTING} | {
    torch.nonzero,
    torch.bincount,
    torch.tensor,
}
"""Functions that bring numbers to the host, or a size, or the host's numbers from
memory that a GPU cannot fetch.
"""
IN_WORKERS = {"model_executor", "cache_methods"}
"""Folders whose code runs in workers."""
INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
REFRESHES = [
    ("dual", {"refresh": "response"}),
    ("dual", {"refresh": "near"}),
    ("sparse", {"refresh": "response"}),
]
PROMPTS = [[7 * i % 100 for i in range(1, length)] for length in (14, 10, 6, 14)]


class CountsWaits(TorchFunctionMode):
    """Counts the calls in a file of ``IN_WORKERS`` that wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in WAITING or (func in INDEXING and index_waits(*args)):
            frame = sys._getframe(1)
            caller = Path(frame.f_code.co_filename)
            if IN_WORKERS & {*caller.parts}:
                self.calls.append(f"{caller.name}:{frame.f_lineno} {func.__name__}")
        return func(*args, **(kwargs or {}))


def index_waits(tensor, index, value=None) -> bool:
    """Indexing by a mask, or by a number on the device, asks for a size. One number of
    the host that is written is filled in by a mask, but copied for an index."""
    parts = [
        part
        for part in (index if isinstance(index, tuple) else (index,))
        if isinstance(part, torch.Tensor)
    ]
    if value is not None and not isinstance(value, torch.Tensor):
        return any(part.dtype != torch.bool for part in parts)
    return any(part.dtype == torch.bool or part.dim() == 0 for part in parts)


@pytest.fixture
def under(monkeypatch):
    """``under(llm, make)``: from now on each dispatch runs under a mode that ``make``
    gives; a list of these modes.
    """

    def watch(llm, make):
        runner, modes = runner_of(llm), []
        execute = runner.execute_model

        def watched(*args, **kwargs):
            modes.append(make())
            with modes[-1]:
                return execute(*args, **kwargs)

        monkeypatch.setattr(runner, "execute_model", watched)
        return modes

    return watch


asked = partial(DiffusionParams, gen_length=12, block_length=6, ignore_eos=True)


@pytest.mark.parametrize(
    ("method", "options"),
    [*((n, SHORT_INTERVALS.get(n, {})) for n in CACHE_METHODS), *REFRESHES],
)
def test_a_dispatch_waits_for_what_it_filled_and_no_more(
    engines, tiny_dream, tiny_sdar, under, method, options
):
    """Also where blocks end, and in steps that refresh. What the host must know besides
    comes along: how many slots MaskKV needs after a vote, and by what d2Cache chooses
    rows. The importance of layers MaskKV must know before, and FOCUS how many rows go
    on."""
    model = tiny_dream if method in FULL_METHODS else tiny_sdar
    llm = engines.shared(
        model, trace=False, cache_method=method, cache_options=options, page_size=8
    )
    params = [
        asked(),
        asked(threshold=0.2),
        asked(unmasking="entropy"),
        asked(temperature=0.8, seed=1),
    ]
    generate(llm, PROMPTS, params)  # recording waits
    modes = under(llm, CountsWaits)
    generate(llm, PROMPTS, params)
    allowed = {"maskkv": 2, "focus": 2}.get(method, 1)
    calls = max((mode.calls for mode in modes), key=len)
    assert len(calls) == allowed, calls


OPTIONS = SHORT_INTERVALS | {"sparse": {"scorer": "mask_voting"}}
FACTORIES = {
    torch.arange,
    torch.empty,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.tensor,
    torch.zeros,
}


class OnTheDevice(TorchFunctionMode):
    """Refuses factories that are not told a device, where a file of ``IN_WORKERS``
    calls them.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in FACTORIES and not kwargs.keys() & {"device", "pin_memory"}:
            caller = Path(sys._getframe(1).f_code.co_filename)
            if IN_WORKERS & {*caller.parts}:
                raise AssertionError(
                    f"{caller.name} calls {func.__name__}{args} and names no device"
                )
        return func(*args, **kwargs)


@pytest.mark.parametrize(("method", "model"), EACH_METHOD_WITH_A_MODEL)
def test_tensors_of_every_cache_method_name_their_device(
    engines, checkpoint_of, under, monkeypatch, method, model
):
    options = OPTIONS.get(method, {})
    llm = engines.shared(
        checkpoint_of(model), cache_method=method, cache_options=options, page_size=8
    )
    set_steps_per_dispatch(llm, 4, monkeypatch)
    under(llm, OnTheDevice)
    params = [
        asked(),
        asked(threshold=0.2),
        *[asked(temperature=0.8, top_p=0.9, seed=1)] * 2,
    ]
    prompts = PROMPTS
    if method == "none":  # which takes every way of unmasking
        params += [
            asked(unmasking=name)
            for name in UNMASKING_POLICIES
            if name not in PARALLEL_RULES
        ]
        params += [asked(**way) for way in WAYS]
        prompts = [PROMPTS[i % 4] for i in range(len(params))]
    generate(llm, prompts, params)
