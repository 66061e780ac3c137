"""The rows that a d2Cache pass chooses for the next one: never more than planned, and enough to go on."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.model_executor.passes.d2_cache import choose_rows
from dllm_engine.model_executor.step_batch import Canvas
from dllm_engine.model_executor.token_prediction import SamplingSettings
from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import ParallelRule
from dllm_engine.scheduler.step_plan import RowRule
from tests.support.plans import cache_of, plan_of, spec_of


@given(
    prompt_length=st.integers(1, 6),
    gen_length=st.integers(2, 40),
    block_length=st.integers(1, 40),
    masked_rows=st.integers(1, 12),
    rollout_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    gap_fill=st.integers(0, 5),
    range_unit=st.sampled_from(["masks", "block"]),
    several=st.booleans(),
    delays=st.booleans(),
    shifts_logits=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_the_next_step_can_fill_something_and_computes_no_more_than_planned(
    prompt_length, gen_length, block_length, several, delays, shifts_logits, seed, **options
):
    rule = {"parallel": ParallelRule("threshold", 0.5), "block_add_threshold": 0.3} if several else {}
    spec = spec_of(
        prompt_length=prompt_length,
        gen_length=gen_length,
        block_length=min(block_length, gen_length),
        steps=gen_length,
        shifts_logits=shifts_logits,
        delay_eos=delays,
        cache=cache_of("d2_cache", **options),
        **rule,
    )
    draw = np.random.default_rng(seed)
    canvas = Canvas(spec, 0, SamplingSettings.of(spec))
    canvas.known = np.where(np.arange(spec.canvas_length) < prompt_length, 5, -1)
    progress, confidence = Progress.begin(spec), draw.random(spec.canvas_length)
    while True:
        before, window = canvas.known[prompt_length:] >= 0, spec.span_of(progress.running)
        computed = range(spec.canvas_length) if canvas.next_rows is None else canvas.next_rows.tolist()
        masked = window.start + np.flatnonzero(canvas.known[slice(*window)] < 0)
        fillable = [p for p in masked if p - shifts_logits in computed]
        leftmost = spec.block_span(progress.leftmost)
        assert any(leftmost.start <= p < leftmost.stop for p in fillable)
        assert not delays or masked[0] in fillable
        canvas.last_unmasked = sorted(draw.choice(fillable, draw.integers(1, len(fillable) + 1), replace=False))
        canvas.known[canvas.last_unmasked] = 5
        progress.advance(spec, len(canvas.last_unmasked), canvas.masked_per_block(window))
        if (canvas.known >= 0).all():
            break
        importance = draw.random(spec.canvas_length)
        canvas.next_rows = choose_rows(canvas, window, before, confidence, importance)
        plan = plan_of(spec, "d2_cache", progress)
        assert plan.rows is RowRule.CHOSEN
        assert np.all(np.diff(canvas.next_rows) > 0)
        assert len(canvas.next_rows) <= plan.max_rows
        assert set(canvas.last_unmasked) <= set(canvas.next_rows)
