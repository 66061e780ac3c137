"""Recorded steps: the tokens are those of steps that are not; on a GPU with CUDA graphs, elsewhere with a stand-in."""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.support.engines import assert_nothing_left, generate, runner_of, start_engine

BATCHES = [[17], [9, 30, 12], [21, 5, 8, 40, 11], [33]]
"""Prompt lengths of requests that run together; pages go from one batch to the next."""


def answers(llm, **params):
    from dllm_engine import DiffusionParams

    settings = {"gen_length": 16, "block_length": 8, "ignore_eos": True} | params
    draw = random.Random(1)
    found = []
    for lengths in BATCHES:
        prompts = [[draw.randrange(140) for _ in range(length)] for length in lengths]
        for output in generate(llm, prompts, DiffusionParams(**settings)):
            completion = output.outputs[0]
            found.append((list(completion.token_ids), completion.diffusion.unmasked_per_step))
    return found


@pytest.fixture
def recording(engines):
    """``recording(model, **settings)``: an engine and its recorder, until the test ends."""
    changed = []

    def start(model, **settings):
        from tests.support.stand_in_recorder import record_steps

        llm = engines(model, page_size=4, **settings)
        changed.append(runner_of(llm))
        return llm, record_steps(runner_of(llm))

    yield start
    for runner in changed:
        runner.denoiser.graphs = None


def recordable() -> list[str]:
    from dllm_engine.scheduler.methods import CACHE_METHODS

    return [name for name, method in CACHE_METHODS.items() if method.recordable]


@pytest.mark.parametrize("method", recordable())
def test_recorded_steps_give_the_same_tokens(engines, recording, tiny_llada, tiny_dream, method):
    for checkpoint in (tiny_llada, tiny_dream):
        expected = answers(engines(checkpoint, page_size=4, cache_method=method))
        llm, recorder = recording(checkpoint, cache_method=method)
        assert answers(llm) == expected
        assert recorder.num_replayed > 2 * recorder.num_recorded > 0
        assert_nothing_left(llm)


def test_a_batch_is_padded_to_the_next_graph(recording, tiny_llada):
    llm, recorder = recording(tiny_llada, cache_method="dual")
    answers(llm)
    assert set(runner_of(llm).denoiser.graphs.graphs) == {(1, 8), (4, 8), (8, 8)}
    assert recorder.num_recorded == 3


def test_several_steps_per_dispatch_replay_too(engines, recording, tiny_llada, monkeypatch):
    settings = {"cache_method": "sparse", "steps_per_dispatch": 4}
    expected = answers(engines(tiny_llada, page_size=4, **settings))
    llm, recorder = recording(tiny_llada, **settings)
    monkeypatch.setattr(runner_of(llm), "looks_ahead", True)
    assert answers(llm) == expected
    assert recorder.num_replayed


def test_requests_of_different_blocks_run_as_they_come(engines, recording, tiny_llada):
    from dllm_engine import DiffusionParams

    params = [DiffusionParams(gen_length=12, block_length=block, ignore_eos=True) for block in (4, 6)]
    prompts = [[3, 4, 5, 6], [7, 8, 9]]
    expected = generate(engines(tiny_llada, page_size=4, cache_method="dual"), prompts, params)
    llm, _ = recording(tiny_llada, cache_method="dual")
    for output, other in zip(generate(llm, prompts, params), expected, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
    assert not {size for size in runner_of(llm).denoiser.graphs.graphs if size[0] > 1}


def test_long_steps_run_as_they_come(recording, tiny_llada, monkeypatch):
    monkeypatch.setattr("dllm_engine.model_executor.step_graphs.MAX_ROWS", 8 * 3)
    llm, _ = recording(tiny_llada, cache_method="dual")
    answers(llm)
    assert set(runner_of(llm).denoiser.graphs.graphs) == {(1, 8)}


def test_the_least_recently_replayed_graph_goes_first(engines, recording, tiny_llada, monkeypatch):
    expected = answers(engines(tiny_llada, page_size=4, cache_method="dual"))
    monkeypatch.setattr("dllm_engine.model_executor.step_graphs.MAX_GRAPHS", 2)
    llm, recorder = recording(tiny_llada, cache_method="dual")
    assert answers(llm) == expected
    assert list(runner_of(llm).denoiser.graphs.graphs) == [(8, 8), (1, 8)]
    assert recorder.num_recorded == 4


def test_requests_are_padded_to_few_sizes():
    from dllm_engine.model_executor.step_graphs import padded_requests

    assert [padded_requests(n) for n in (1, 2, 3, 4, 5, 8, 9, 64)] == [1, 2, 4, 4, 8, 8, 16, 64]


def test_the_recorder_would_notice_the_host():
    from tests.support.stand_in_recorder import StandInRecorder

    ones = torch.ones(3)
    for run in (
        lambda: ones * int(ones.sum()),
        lambda: ones + torch.tensor([1.0, 2.0, 3.0]),
        lambda: ones[ones > 0],
    ):
        with torch.inference_mode(), pytest.raises(AssertionError, match=r"device|host"):
            StandInRecorder()(run)


class NotLaunched:
    """A Triton kernel whose launches do nothing."""

    def __getitem__(self, grid):
        return lambda *args, **constants: None


def test_launching_asks_nothing_of_the_host(monkeypatch):
    pytest.importorskip("triton")
    from dllm_engine.check.paged_case import paged_case
    from dllm_engine.kernels.triton import paged_attention, rotary
    from tests.support.stand_in_recorder import NothingOfTheHost

    for module in (paged_attention, rotary):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, NotLaunched())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    case = paged_case([8, 8], [[20, 20], [12, 12]], heads=4, dim=16)
    case = case._replace(tokens=case.tokens._replace(max_head_len=64))
    heads, positions, phases = torch.zeros(16, 3, 16)[:, :2], torch.arange(16), torch.zeros(16, 16)

    def step(max_seqlen: int | None) -> None:
        rotary.rotate_(heads, positions, phases)
        paged_attention.paged_attention(*case.arguments(True, False, False, max_seqlen))

    with torch.inference_mode(), NothingOfTheHost():
        step(max_seqlen=8)
        with pytest.raises(AssertionError, match="asks the device for a number"):
            step(max_seqlen=None)


def test_methods_that_cannot_be_recorded_are_refused():
    from dllm_engine.options import EngineOptions
    from dllm_engine.scheduler.methods import CACHE_METHODS

    for method in CACHE_METHODS:
        if CACHE_METHODS[method].recordable:
            assert EngineOptions.parse({"cache_method": method, "cuda_graphs": True}).cuda_graphs
        else:
            with pytest.raises(ValueError, match=f"cuda_graphs=True .*prefix, dual, sparse, freecache.*'{method}'"):
                EngineOptions.parse({"cache_method": method, "cuda_graphs": True})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(tiny_llada):
    with pytest.raises(ValueError, match="cuda_graphs=True needs a CUDA device, and the engine runs on cpu"):
        start_engine(tiny_llada, cache_method="sparse", cuda_graphs=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", recordable())
def test_cuda_graphs_give_the_same_tokens(engines, tiny_llada, method):
    expected = answers(engines(tiny_llada, page_size=4, cache_method=method))
    llm = engines(tiny_llada, page_size=4, cache_method=method, cuda_graphs=True)
    assert answers(llm) == expected
    assert runner_of(llm).denoiser.graphs.graphs


def test_it_is_an_option_of_the_command_line():
    from dllm_engine.cli.main import build_parser
    from dllm_engine.cli.serve import merged_config

    args, _ = build_parser().parse_known_args(["serve", "demo", "--cache-method", "sparse", "--cuda-graphs"])
    assert merged_config(args, {})["dllm"]["cuda_graphs"] is True
    assert build_parser().parse_args(["generate", "Hello!", "--cuda-graphs"]).cuda_graphs
