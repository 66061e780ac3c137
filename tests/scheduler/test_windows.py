"""Several running blocks: which join when, and what the plans of cache methods make of their window."""

from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import Blocks, ParallelRule
from tests.support.plans import cache_of
from tests.support.plans import spec_of as spec


def several(method: str = "none", block_add_threshold: float | None = 0.5):
    """A prompt of 10 tokens and a response of blocks of 8, 8 and 5."""
    rule = ParallelRule("threshold", 0.9)
    return spec(cache=cache_of(method), parallel=rule, block_add_threshold=block_add_threshold)


def advanced(request, masked: list[list[int]]) -> list[tuple[Blocks, int]]:
    """The running blocks and the step, before each pass and after the last; ``masked``: what each pass leaves."""
    progress = Progress.begin(request)
    seen = [(progress.running, progress.step)]
    for left in masked:
        progress.advance(request, progress.num_masked - sum(left), left)
        seen.append((progress.running, progress.step))
    return seen


def test_a_block_joins_once_its_share_of_the_last_one_is_decided():
    assert advanced(several(), [[6], [4], [2, 5], [2, 4], [1, 1, 5]]) == [
        ((0, 1), 0), ((0, 1), 1), ((0, 2), 0), ((0, 2), 1), ((0, 3), 0), ((0, 3), 1),
    ]  # fmt: skip


def test_complete_blocks_leave_when_the_next_one_joins():
    # The first is complete while the second has decided too little: it stays until the third joins.
    assert advanced(several(), [[4], [0, 7], [0, 4]]) == [((0, 1), 0), ((0, 2), 0), ((0, 2), 1), ((1, 3), 0)]


def test_a_share_of_nothing_adds_a_block_in_every_step_and_of_all_one_after_the_other():
    assert [running for running, _ in advanced(several(block_add_threshold=0.0), [[8, 7], [8, 7, 5]])] == [
        (0, 2), (0, 3), (0, 3),
    ]  # fmt: skip
    for share in (1.0, None):
        assert [running for running, _ in advanced(several(block_add_threshold=share), [[1], [0], [1], [0]])] == [
            (0, 1), (0, 1), (1, 2), (1, 2), (2, 3),
        ]  # fmt: skip


def test_no_block_joins_after_the_response_has_ended():
    request, progress = several(), Progress.begin(several())
    progress.advance(request, 5, [3], ends=True)
    assert (progress.running, progress.step) == ((0, 1), 1)


# Blocks join before passes 3 and 6; the first one leaves then.
