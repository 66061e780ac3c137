"""How the runner lays out a batch and finds the rows that predict each masked position; no model involved."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dllm_engine.model_executor.candidates import BatchCandidates
from dllm_engine.model_executor.canvas_store import CanvasStore
from dllm_engine.model_executor.model_runner import DiffusionModelRunner
from dllm_engine.scheduler.messages import NewRequest
from dllm_engine.scheduler.refresh_plan import plan_none
from dllm_engine.scheduler.request import DecodingSpec, Progress
from dllm_engine.scheduler.step_plan import RowRule

MASK = 99


def make_runner(*, shifts_logits: bool) -> DiffusionModelRunner:
    runner = object.__new__(DiffusionModelRunner)
    runner.device, runner.mask_token_id = torch.device("cpu"), MASK
    runner.model = SimpleNamespace(layers=[None, None])
    runner.canvases, runner.shifts_logits = {}, shifts_logits
    runner.store = CanvasStore(runner.device)
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
    candidates = BatchCandidates.of(batch, runner.store)
    assert candidates.requests.tolist() == [0] * 4 + [1] * len(expected)
    assert candidates.positions.tolist() == [1, 2, 3, 4, *expected]
    # Behind the 5 rows of the other request; Dream's are predicted by the row before.
    assert candidates.rows.tolist() == [p - shifts_logits for p in [1, 2, 3, 4, *(p + 5 for p in expected)]]
    assert runner.store.masked[candidates.places].all()


def test_positions_already_filled_are_no_candidates():
    runner = make_runner(shifts_logits=False)
    batch = runner._build_batch({"a": add(runner, "a", [5, 6, 7])})
    runner.canvases["a"].masked[[3, 5]] = False
    assert BatchCandidates.of(batch, runner.store).positions.tolist() == [4, 6]
    runner.canvases["a"].masked[:7] = False
    assert not BatchCandidates.of(batch, runner.store).positions.numel(), "later blocks wait for their turn"


@pytest.mark.parametrize("shifts_logits", [False, True])
@pytest.mark.parametrize("and_last", [False, True])
def test_rows_that_masks_decide_are_what_was_masked_before_the_last_step(shifts_logits, and_last):
    runner = make_runner(shifts_logits=shifts_logits)
    rule = RowRule.MASKED_BEFORE_AND_LAST if and_last else RowRule.MASKED_BEFORE
    plans = {
        "before": add(runner, "before", [1, 2], gen_length=4),
        "a": replace(add(runner, "a", [5, 6, 7]), rows=rule),
        "after": add(runner, "after", [3] * 20, gen_length=4),
    }
    canvas = runner.canvases["a"]
    canvas.tokens[[4, 6]], canvas.masked[[4, 6]] = 50, False
    canvas.last_unmasked = [6]
    batch = runner._build_batch(plans)
    assert batch.request_ids == ["before", "a", "after"]
    predicting = [p - shifts_logits for p in (3, 5, 6, 7, 8, 9, 10, 11)]
    expected = sorted({*predicting, 11} if and_last else {*predicting})
    assert batch.positions[batch.rows(1)].tolist() == expected
    assert batch.input_ids[batch.rows(1)].tolist() == canvas.tokens[expected].tolist()
    assert [batch.num_rows(0), batch.num_rows(2)] == [6, 24]
    # What was filled already is predicted by none of them, or by a row that is no longer asked.
    candidates = BatchCandidates.of(batch, runner.store)
    mine = candidates.requests == 1
    assert candidates.positions[mine].tolist() == [3, 5]
    rows = candidates.rows[mine] - batch.rows(1).start
    assert [expected[row] for row in rows] == [p - shifts_logits for p in (3, 5)]
