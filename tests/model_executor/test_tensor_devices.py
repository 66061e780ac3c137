"""Whatever a step makes lies on the engine's device. On a CPU nothing goes wrong where a tensor names none; here it
does, as it would on a GPU."""

import sys
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from dllm_engine import DiffusionParams
from dllm_engine.scheduler.unmasking import PARALLEL_RULES, UNMASKING_POLICIES
from tests.support.engines import EACH_METHOD_WITH_A_FAMILY, generate, runner_of, set_steps_per_dispatch
from tests.support.plans import SHORT_INTERVALS

OPTIONS = SHORT_INTERVALS | {"sparse": {"scorer": "mask_voting"}}
FACTORIES = {torch.arange, torch.empty, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros}


class EveryTensorNamesItsDevice(TorchFunctionMode):
    """Refuses factories that are not told a device, where a file of one of the ``folders`` calls them."""

    def __init__(self, *folders: str) -> None:
        super().__init__()
        self.folders = folders

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in FACTORIES and not kwargs.keys() & {"device", "pin_memory"}:
            caller = Path(sys._getframe(1).f_code.co_filename)
            if any(folder in caller.parts for folder in self.folders):
                raise AssertionError(f"{caller.name} calls {func.__name__}{args} and names no device")
        return func(*args, **kwargs)


@pytest.fixture
def strict(monkeypatch):
    """``strict(llm)``: from now on its steps must name the device of every tensor. Kernels are left alone: those of a
    CPU are for a CPU."""

    def watch(llm):
        runner = runner_of(llm)
        execute = runner.execute_model

        def watched(*args, **kwargs):
            with EveryTensorNamesItsDevice("model_executor"):
                return execute(*args, **kwargs)

        monkeypatch.setattr(runner, "execute_model", watched)
        return llm

    return watch


def asked(**settings):
    return DiffusionParams(**({"gen_length": 12, "block_length": 6, "ignore_eos": True} | settings))


PROMPTS = [[7 * i % 100 for i in range(1, 14)], [3, 4, 5, 6, 7, 8, 9, 10, 11], [50, 51, 52, 53]]


@pytest.mark.parametrize(("method", "family"), EACH_METHOD_WITH_A_FAMILY)
def test_of_every_cache_method(engines, tiny_llada, tiny_dream, strict, monkeypatch, method, family):
    model = {"LLaDA": tiny_llada, "Dream": tiny_dream}[family]
    llm = engines.shared(model, cache_method=method, cache_options=OPTIONS.get(method, {}), page_size=8)
    set_steps_per_dispatch(llm, 4, monkeypatch)
    generate(strict(llm), PROMPTS, [asked(), asked(threshold=0.2), asked(temperature=0.8, top_p=0.9, seed=1)])


def test_of_every_way_of_unmasking(engines, tiny_llada, strict):
    llm = strict(engines(tiny_llada, cache_method="none", page_size=8))
    params = [asked(unmasking=name) for name in UNMASKING_POLICIES if name not in PARALLEL_RULES]
    params += [asked(factor=0.5), asked(entropy_bound=0.1), asked(margin=0.3), asked(delay_eos=True), asked(logprobs=3)]
    params += [asked(temperature=0.5, top_k=4, seed=3), asked(slow_fast={"span_steps": 1, "fast_minimum": 3})]
    generate(llm, [PROMPTS[i % 3] for i in range(len(params))], params)


def test_of_a_guide(engines, strict):
    llm = strict(engines("demo", guide_model="demo", skip_tokenizer_init=False))
    generate(llm, PROMPTS, [asked(), asked(guide_correction=True), asked(guide_fallback="draft")])


def test_what_names_no_device_is_noticed():
    with EveryTensorNamesItsDevice("tests"), pytest.raises(AssertionError, match=r"arange\(3,\) and names no device"):
        torch.arange(3)
