"""What a cell's samples amount to."""

import pytest
import torch

from dllm_engine import DiffusionParams
from dllm_engine.bench.cells import (
    Cell,
    Distribution,
    RequestSample,
    Sample,
    cell_figures,
    measure_floors,
    repetition_rate,
    run_engine,
    run_plain,
)
from dllm_engine.bench.floor import PassShape
from dllm_engine.bench.plain import PlainDecoder, PlainResponse
from dllm_engine.bench.subject import Unmasking
from dllm_engine.checkpoints import load_config
from dllm_engine.evaluation.answering import Memory
from dllm_engine.families import LLADA
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.options.resolve import resolve_decoding
from tests.support.engines import assert_nothing_left, generate, runner_of


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [
        ("abcdefg", 0.0),  # four 4-grams, all different
        ("abcdabcd", 0.2),  # abcd bcda cdab dabc abcd: one of five was there before
        ("aaaaaaaa", 0.8),  # five times aaaa
        ("abcabcabc", 0.5),  # abca bcab cabc, and the same again
        ("abcd", 0.0),
        ("abc", None),
    ],
)
def test_repetition_is_the_share_of_4_grams_seen_before(tokens, rate):
    assert repetition_rate([ord(c) for c in tokens]) == (rate if rate is None else pytest.approx(rate))


def test_percentiles_are_linear_between_ranks():
    assert Distribution.of_values([7.0]) == Distribution(7.0, 7.0, 7.0, 1)
    assert Distribution.of_values([1.0, 2.0, 3.0]) == Distribution(2.0, pytest.approx(2.8), pytest.approx(2.98), 3)


def test_figures_of_made_up_samples():
    block, canvas = PassShape(((8, 32),) * 2, 10), PassShape(((32, 32),) * 2, 16)

    def sample(seconds, step, floor, working):
        requests = [
            RequestSample((1, 2, 3, 4, 5, 6), (0.5, 1.0), PlainResponse([], 10, 200, 16)),
            RequestSample((7, 7), (0.5, 2.0), PlainResponse([], 6, 120, 16)),
        ]
        steps = {"reuse": [(block, step), (PassShape(((8, 32),) * 2, 3), 3 * step)], "whole": [(canvas, 9.0)]}
        return Sample(seconds, requests, Memory(300, 64, working, 1000), steps, {"reuse": (block, floor)})

    samples = [sample(2.0, 0.2, 0.1, 5), sample(4.0, 0.3, 0.1, 9), sample(1.0, 0.4, 0.4, 7)]
    cell = Cell("dual", Unmasking("one", {}), 2, 24)
    figures = cell_figures(cell, 0, samples, has_random_weights=False)
    assert (figures["method"], figures["unmasking"], figures["batch"], figures["prompt"]) == ("dual", "one", 2, 24)
    # Eight visible tokens in each sample.
    assert figures["tokens_per_second"] == 4.0
    assert (figures["tokens_per_second_lowest"], figures["tokens_per_second_highest"]) == (2.0, 8.0)
    assert figures["visible_tokens"] == 4.0
    assert figures["latency"]["median"] == 1.5
    assert figures["latency"]["of"] == 6
    assert figures["block_gap"]["median"] == 1.0
    assert figures["tokens_per_forward"] == 2.0
    assert figures["rows_computed"] == 160
    assert figures["rows_per_token"] == 40
    assert (figures["weight_bytes"], figures["page_bytes"], figures["working_bytes"]) == (300, 64, 7)
    assert figures["repetition"] == 0.0
    # Steps of the same requests count, whatever their head rows: medians 0.4, 0.6 and 0.8 over their floors.
    assert figures["reuse"]["time_over_floor"] == pytest.approx(4.0)
    assert (figures["reuse"]["rows"], figures["reuse"]["keys"], figures["reuse"]["head_rows"]) == (16, 32, 10)
    assert figures["whole"] is None
    assert cell_figures(cell, 0, samples, has_random_weights=True)["repetition"] is None


def test_a_cell_is_measured_on_an_engine(engines, tiny_llada):
    llm = engines(tiny_llada, cache_method="sparse")
    params = DiffusionParams(gen_length=16, block_length=8, ignore_eos=True)
    prompts = [[5] * 24, [6] * 24]
    expected = [tuple(output.outputs[0].token_ids) for output in generate(llm, prompts, params)]
    sample = run_engine(llm, prompts, params, frozenset())
    assert [request.visible for request in sample.requests] == expected
    for request in sample.requests:
        first_block, latency = request.block_times
        assert 0 < first_block < latency <= sample.seconds
        assert (request.cost.forward_passes, request.cost.tokens_unmasked) == (16, 16)
        assert request.cost.tokens_computed == 2 * (2 * 40 + 6 * 8)
    # Per request and layer a page for the 16 tokens retained.
    pages = runner_of(llm).pages.memory
    assert sample.memory.page_bytes == 2 * len(runner_of(llm).model.layers) * pages[0].numel() * pages.element_size()
    assert sample.memory.process_bytes >= sample.memory.working_bytes >= 0
    measure_floors(llm, sample)
    assert {kind: shape.requests for kind, (shape, _) in sample.floors.items()} == {
        "whole": ((40, 40),) * 2,
        "reuse": ((8, 24),) * 2,
    }
    assert all(seconds > 0 for _, seconds in sample.floors.values())
    assert_nothing_left(llm)


def test_the_baseline_answers_one_request_after_the_other(tiny_llada):
    model = PlainDecoder.from_checkpoint(tiny_llada, load_config(str(tiny_llada)), torch.float32)
    params = DiffusionParams(gen_length=8, block_length=4, ignore_eos=True)
    spec = resolve_decoding(params, 24, LLADA, EngineOptions())
    sample = run_plain(model, [[5] * 24, [6] * 24], spec, frozenset())
    assert [len(request.visible) for request in sample.requests] == [8, 8]
    assert sample.seconds == pytest.approx(sum(request.block_times[-1] for request in sample.requests))
    assert [request.cost.tokens_computed for request in sample.requests] == [8 * 32, 8 * 32]
    assert sample.memory.page_bytes == 0
    assert not sample.steps
