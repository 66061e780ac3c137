"""What a GPU's worker does before the first request, here on a CPU: with stand-ins for
graphs and for compiling.
"""

import copy
import re
from dataclasses import replace

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.model_executor import warm_up
from dllm_engine.model_executor.warm_up import WarmUp
from tests.support.engines import assert_nothing_left, responses, runner_of
from tests.support.fake_cuda_graphs import FakeGraphs
from tests.support.plans import FULL_METHODS, SHORT_INTERVALS


@pytest.fixture
def engine(engines, tiny_llada, tiny_sdar):
    """``engine(method)``: canvases of up to 128 positions, three requests at once."""

    def start(method):
        model = tiny_llada if method in FULL_METHODS else tiny_sdar
        sizes = {"page_size": 4, "max_model_len": 128, "max_num_seqs": 3}
        return engines(
            model,
            cache_method=method,
            cache_options=SHORT_INTERVALS.get(method, {}),
            **sizes,
        )

    return start


@pytest.fixture
def warmed(engine, monkeypatch):
    """``warmed(method, recorder)``: an engine that has recorded, until
    the test ends.
    """

    def start(method, recorder):
        llm = engine(method)
        recorder.runner = runner_of(llm)
        monkeypatch.setattr(recorder.runner.denoiser, "graphs", None)
        warm_up = WarmUp(recorder.runner)
        warm_up.compile()
        warm_up.record(recorder, show_progress=False)
        return llm

    return start


@pytest.mark.parametrize("method", ["none", "dual"])
def test_the_largest_batch_has_run_before_anything_is_recorded(
    engine, monkeypatch, method
):
    """vLLM's experts keep the memory of their largest batch. It must not grow once
    graphs use it.
    """
    runner, ran = runner_of(engine(method)), []
    monkeypatch.setattr(runner, "profile_run", lambda: ran.append(method))
    WarmUp(runner).compile()
    assert ran == ([] if runner.options.uses_pages else ["none"])


def test_the_largest_batch_has_the_rows_of_the_largest_graph(engine, monkeypatch):
    runner, rows = runner_of(engine("none")), []
    forward = runner.model.forward
    monkeypatch.setattr(
        runner, "rank", replace(runner.rank, max_num_batched_tokens=130)
    )
    monkeypatch.setattr(
        runner.model,
        "forward",
        lambda ids, *others: rows.append(len(ids)) or forward(ids, *others),
    )
    runner.profile_run()
    assert rows == [256]


@pytest.mark.parametrize("method", CACHE_METHODS)
def test_what_requests_of_the_defaults_need_is_recorded(engine, warmed, method):
    prompts = [[5] * 40, [6] * 3, [7] * 64]
    params = DiffusionParams(gen_length=64, ignore_eos=True)
    expected = responses(engine(method), prompts, params)
    # A warm-up writes to any page, since it comes before the first request.
    engine(method).reset_prefix_cache()
    recorder = FakeGraphs()
    llm = warmed(method, recorder)
    assert_nothing_left(llm)
    graphs = runner_of(llm).denoiser.graphs
    replayed = recorder.num_replayed

    def recorded():
        """What needs no other length of prompt."""
        return {
            size for size in graphs.forwards.graphs if size.reads
        } | graphs.fillings.graphs.keys()

    before = recorded()
    assert before
    assert responses(llm, prompts, params) == expected
    # Requests of `dkv` have fewer and fewer rows, each its own number.
    assert recorded() == before or method == "dkv"
    assert recorder.num_replayed >= replayed + 64


class Forgetful(FakeGraphs):
    """Replays give what was recorded, whatever the tensors hold by then."""

    def __init__(self, graphs_of: str) -> None:
        super().__init__()
        self.graphs_of = graphs_of

    def __call__(self, run, **options):
        replay = super().__call__(run, **options)
        result = copy.deepcopy(run())
        return (
            (lambda: result)
            if isinstance(result, tuple) == (self.graphs_of == "filling")
            else replay
        )


class Failing(FakeGraphs):
    def __call__(self, run, **options):
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("recorder", "said"),
    [
        (
            Failing(),
            "recording failed with RuntimeError: operation not permitted when stream "
            "is capturing",
        ),
        (
            Forgetful("forward"),
            r"a replayed pass of \d+ requests with \d+ rows differs by ",
        ),
        (
            Forgetful("filling"),
            r"replayed filling of \d+ candidates differs from launched filling",
        ),
    ],
    ids=["fails", "forward", "filling"],
)
def test_recordings_that_fail_or_differ_are_not_used(
    engine, warmed, lines_of, recorder, said
):
    prompts = [[5] * 40, [6] * 3]
    params = DiffusionParams(gen_length=24, block_length=8, ignore_eos=True)
    expected = responses(engine("sparse"), prompts, params)
    warnings = lines_of(warm_up.logger, "warning")
    llm = warmed("sparse", recorder)
    (warning,) = warnings
    assert re.search(said, warning), warning
    assert runner_of(llm).denoiser.graphs is None
    assert responses(llm, prompts, params) == expected
    assert_nothing_left(llm)
