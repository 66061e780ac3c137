"""Plans of block diffusion: how a long prompt is fed in parts. What steps feed is in ``test_random_requests.py``."""

import pytest

from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.page_layout import PageKind
from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import Blocks
from tests.support.plans import GEOMETRY, spec_of

BLOCK = CACHE_METHODS["block"]


def block_spec(prompt_length: int, gen_length: int, **changes):
    asked = {"block_length": 4, "attention": "block_causal", "steps": gen_length + 3} | changes
    return spec_of(prompt_length=prompt_length, gen_length=gen_length, **asked)


def fed(plan) -> tuple:
    return plan.state.value, tuple(plan.span), plan.read, plan.retained


@pytest.mark.parametrize(("room", "stop"), [(4, 4), (7, 4), (8, 8), (39, 36), (100, 40)])
def test_a_long_prompt_is_kept_in_parts_of_whole_blocks(room, stop):
    spec = block_spec(43, 8)
    plan = BLOCK.plan(spec, Progress.begin(spec))
    part = BLOCK.fitted(plan, spec, room)
    if room >= plan.max_rows:
        assert part == plan
        return
    assert fed(part) == ("update", (0, stop), 0, stop)
    assert (part.max_rows, part.quota.count, part.prefills) == (stop, 0, True)


def test_parts_are_no_denoising_steps():
    spec, progress = block_spec(43, 8, temperature=1.0), Progress.begin(block_spec(43, 8))
    whole = BLOCK.plan(spec, progress)
    for kept in (16, 32):
        part = BLOCK.fitted(BLOCK.plan(spec, progress), spec, 16)
        assert part.retained == kept
        progress.advance(spec, 0, [1], retained=part.retained, prefills=part.prefills)
    plan = BLOCK.plan(spec, progress)
    assert fed(plan) == ("update", (32, 44), 32, 40)
    assert (plan.forward, plan.quota) == (whole.forward, whole.quota), "the same tokens, however they were fed"
    assert (progress.num_forwards, progress.num_denoised, progress.step) == (2, 0, 0)


def test_nothing_smaller_than_a_block_is_a_part():
    spec = block_spec(43, 8)
    plan = BLOCK.plan(spec, Progress.begin(spec))
    assert BLOCK.fitted(plan, spec, 3) == plan


def test_pages_come_as_blocks_come():
    spec = block_spec(10, 21)
    held = [BLOCK.pages(spec, Blocks(block, block + 1), GEOMETRY)[PageKind.KV] for block in range(spec.num_blocks)]
    assert held == [[pages] * 4 for pages in (2, 3, 4, 5, 6, 7)]
