"""How many tokens each step unmasks, and how many steps a block gets. What a pass fills is in
``tests/methods/test_random_requests.py``."""

from hypothesis import given
from hypothesis import strategies as st

from dllm_engine.scheduler.unmasking_policies import split_steps, timestep_count, uniform_count
from tests.oracles import decoding as plain


@given(block_size=st.integers(1, 200), steps=st.integers(1, 200))
def test_every_token_is_unmasked_exactly_once(block_size, steps):
    uniform = [uniform_count(block_size, steps, step) for step in range(steps)]
    assert uniform == [plain.llada_count(block_size, steps, step) for step in range(steps)]
    assert sum(uniform) == block_size
    left = block_size
    for step in range(steps - 1):
        count = timestep_count(left, steps, step)
        assert 0 <= count == plain.dream_count(left, steps, step) <= left
        left -= count
    assert timestep_count(left, steps, steps - 1) == left


@given(masks=st.lists(st.integers(1, 60), min_size=1, max_size=30), data=st.data())
def test_no_step_is_lost_between_blocks_and_none_is_empty(masks, data):
    steps = data.draw(st.integers(len(masks), sum(masks)))
    split = split_steps(steps, masks)
    assert list(split) == plain.steps_per_block(steps, masks)
    assert sum(split) == steps
    assert all(1 <= share <= count for share, count in zip(split, masks, strict=True))
    assert split_steps(sum(masks), masks) == tuple(masks)
