"""How a batch is laid out, and how it finds the rows that predict each masked position; no model involved."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from dllm_engine.model_executor.batch_builder import build_batch
from dllm_engine.model_executor.candidates import BatchCandidates
from dllm_engine.model_executor.canvas_store import CanvasStore
from dllm_engine.scheduler.messages import NewRequest
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import Blocks, DecodingSpec
from dllm_engine.scheduler.step_plan import RowRule, StepPlan

MASK = 99


def add(
    store: CanvasStore,
    name: str,
    prompt: list[int],
    *,
    shifts_logits: bool = False,
    gen_length: int = 9,
    block_length: int = 4,
    block: int = 0,
) -> StepPlan:
    """A request at the first step of ``block``; returns its plan."""
    spec = DecodingSpec(
        len(prompt), gen_length, block_length, gen_length, "uniform", "low_confidence", 0.0, 1.0, 0, shifts_logits
    )
    store.open(name, NewRequest(prompt, spec, seed=7))
    return CACHE_METHODS["none"].plan(spec, Progress(Blocks(block, block + 1), masked=[spec.block_span(block).size]))


@pytest.fixture
def store() -> CanvasStore:
    return CanvasStore(torch.device("cpu"), MASK)


def test_requests_lie_end_to_end_with_positions_of_their_own(store):
    plans = {"long": add(store, "long", [1, 2, 3], gen_length=4), "short": add(store, "short", [4], gen_length=4)}
    batch = build_batch(plans, store)
    assert batch.request_ids == ["short", "long"], "by length, so that equal ones share an attention call"
    assert batch.cu_seqlens == [0, 5, 12]
    assert store.tokens[batch.places].tolist() == [4] + [MASK] * 4 + [1, 2, 3] + [MASK] * 4
    assert batch.positions.tolist() == [*range(5), *range(7)]


@pytest.mark.parametrize(("block", "expected"), [(0, [3, 4, 5, 6]), (1, [7, 8, 9, 10]), (2, [11])])
@pytest.mark.parametrize("shifts_logits", [False, True])
def test_candidates_are_the_masked_positions_of_the_block(store, shifts_logits, block, expected):
    shifted = partial(add, store, shifts_logits=shifts_logits)
    plans = {"other": shifted("other", [1], gen_length=4), "a": shifted("a", [5, 6, 7], block=block)}
    batch = build_batch(plans, store)
    candidates = BatchCandidates.of(batch)
    assert candidates.requests.tolist() == [0] * 4 + [1] * len(expected)
    assert candidates.positions.tolist() == [1, 2, 3, 4, *expected]
    # Behind the 5 rows of the other request; Dream's are predicted by the row before.
    assert candidates.rows.tolist() == [p - shifts_logits for p in [1, 2, 3, 4, *(p + 5 for p in expected)]]
    assert store.masked[candidates.places].all()


def test_positions_already_filled_are_no_candidates(store):
    batch = build_batch({"a": add(store, "a", [5, 6, 7])}, store)
    store.canvases["a"].known[[3, 5]] = 50
    assert BatchCandidates.of(batch).positions.tolist() == [4, 6]
    store.canvases["a"].known[:7] = 50
    assert not BatchCandidates.of(batch).positions.numel(), "later blocks wait for their turn"


@pytest.mark.parametrize("shifts_logits", [False, True])
@pytest.mark.parametrize("and_last", [False, True])
def test_rows_that_masks_decide_are_what_was_masked_before_the_last_step(store, shifts_logits, and_last):
    shifted = partial(add, store, shifts_logits=shifts_logits)
    rule = RowRule.MASKED_BEFORE_AND_LAST if and_last else RowRule.MASKED_BEFORE
    plans = {
        "before": shifted("before", [1, 2], gen_length=4),
        "a": replace(shifted("a", [5, 6, 7]), rows=rule),
        "after": shifted("after", [3] * 20, gen_length=4),
    }
    canvas = store.canvases["a"]
    canvas.known[[4, 6]] = canvas.tokens[[4, 6]] = 50
    canvas.last_unmasked = [6]
    batch = build_batch(plans, store)
    assert batch.request_ids == ["before", "a", "after"]
    predicting = [p - shifts_logits for p in (3, 5, 6, 7, 8, 9, 10, 11)]
    expected = sorted({*predicting, 11} if and_last else {*predicting})
    assert batch.positions[batch.rows(1)].tolist() == expected
    assert store.tokens[batch.places[batch.rows(1)]].tolist() == canvas.tokens[expected].tolist()
    assert [batch.num_rows(0), batch.num_rows(2)] == [6, 24]
    # What was filled already is predicted by none of them, or by a row that is no longer asked.
    candidates = BatchCandidates.of(batch)
    mine = candidates.requests == 1
    assert candidates.positions[mine].tolist() == [3, 5]
    rows = candidates.rows[mine] - batch.rows(1).start
    assert [expected[row] for row in rows] == [p - shifts_logits for p in (3, 5)]
