"""How the runner lays out a batch and finds the rows that predict each masked position; no model involved."""

from types import SimpleNamespace

import pytest
import torch

from dllm_engine.model_executor.model_runner import DiffusionModelRunner
from dllm_engine.scheduler.decoding import DecodingSpec, Progress
from dllm_engine.scheduler.messages import NewRequest
from dllm_engine.scheduler.refresh_plan import plan_none

MASK = 99


def make_runner(*, shifts_logits: bool) -> DiffusionModelRunner:
    runner = object.__new__(DiffusionModelRunner)
    runner.device, runner.mask_token_id = torch.device("cpu"), MASK
    runner.model = SimpleNamespace(layers=[None, None])
    runner.canvases, runner.shifts_logits = {}, shifts_logits
    return runner


def add(runner, name: str, prompt: list[int], *, gen_length: int = 9, block_length: int = 4, block: int = 0):
    """A request at the first step of ``block``; returns its plan."""
    spec = DecodingSpec(
        len(prompt),
        gen_length,
        block_length,
        gen_length,
        "uniform",
        "low_confidence",
        0.0,
        1.0,
        0,
        runner.shifts_logits,
    )
    runner.canvases[name] = runner._new_canvas(NewRequest(prompt, spec, seed=7))
    return plan_none(spec, Progress(block=block, num_masked=spec.block_span(block).size))


def test_canvas_is_the_prompt_and_then_masks():
    runner = make_runner(shifts_logits=False)
    add(runner, "a", [5, 6, 7])
    canvas = runner.canvases["a"]
    assert canvas.tokens.tolist() == [5, 6, 7] + [MASK] * 9
    assert canvas.masked.tolist() == [False] * 3 + [True] * 9
    assert canvas.seed == 7


def test_requests_lie_end_to_end_with_positions_of_their_own():
    runner = make_runner(shifts_logits=False)
    plans = {"long": add(runner, "long", [1, 2, 3], gen_length=4), "short": add(runner, "short", [4], gen_length=4)}
    batch = runner._build_batch(plans)
    assert batch.request_ids == ["short", "long"], "by length, so that equal ones share an attention call"
    assert batch.cu_seqlens == [0, 5, 12]
    assert batch.input_ids.tolist() == [4] + [MASK] * 4 + [1, 2, 3] + [MASK] * 4
    assert batch.positions.tolist() == [*range(5), *range(7)]


@pytest.mark.parametrize(("block", "expected"), [(0, [3, 4, 5, 6]), (1, [7, 8, 9, 10]), (2, [11])])
@pytest.mark.parametrize("shifts_logits", [False, True])
def test_candidates_are_the_masked_positions_of_the_block(shifts_logits, block, expected):
    runner = make_runner(shifts_logits=shifts_logits)
    plans = {"other": add(runner, "other", [1], gen_length=4), "a": add(runner, "a", [5, 6, 7], block=block)}
    batch = runner._build_batch(plans)
    candidates = runner._candidates(batch, batch.request_ids.index("a"))
    assert candidates.positions.tolist() == expected
    # Behind the 5 rows of the other request; Dream's are predicted by the row before.
    assert candidates.rows.tolist() == [p + 5 - shifts_logits for p in expected]


def test_positions_already_filled_are_no_candidates():
    runner = make_runner(shifts_logits=False)
    batch = runner._build_batch({"a": add(runner, "a", [5, 6, 7])})
    runner.canvases["a"].masked[[3, 5]] = False
    assert runner._candidates(batch, 0).positions.tolist() == [4, 6]
    runner.canvases["a"].masked[:7] = False
    assert runner._candidates(batch, 0) is None, "later blocks wait for their turn"
