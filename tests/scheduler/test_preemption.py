"""Pages that come as blocks come, in a pool too small for all requests: the newest lose
theirs, and all end.
"""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.request import RequestStatus

from dllm_engine.families import SDAR
from tests.scheduler.test_diffusion_scheduler import (
    HF_CONFIG,
    assert_empty,
    request,
    run,
    scheduler_with,
    step,
)

CONFIG = SimpleNamespace(**vars(HF_CONFIG) | {"family": SDAR})
"""Two layers: a page of each holds a block, so that a block takes two pages."""


def make(*requests, num_blocks, **settings):
    """A scheduler with these requests and pages for so many blocks, and a runner."""
    settings = {"cache_method": "block", "page_size": 4, "log_stats": True} | settings
    return scheduler_with(
        *requests, hf_config=CONFIG, num_pages=2 * num_blocks + 1, **settings
    )


def of_blocks(name, prompt, response, **settings):
    """A request of so many blocks, a step each."""
    asked = {
        "gen_length": 4 * response,
        "block_length": 4,
        "steps_per_block": 1,
        "steps": None,
    } | settings
    return request(name, prompt_length=4 * prompt, **asked)


def test_the_newest_request_loses_its_pages_and_goes_on_where_it_stood():
    scheduler, runner = make(of_blocks("a", 1, 4), of_blocks("b", 1, 4), num_blocks=5)
    ran, plans, events, stats = [], [], [], []
    while scheduler.has_unfinished_requests():
        output, outputs = step(scheduler, runner)
        ran.append([*output.plans])
        plans += [
            (plan.span, plan.forward)
            for name, plan in output.plans.items()
            if name == "b"
        ]
        assert not output.new_requests.keys() & set(ran[0]) or len(ran) == 1, (
            "the runner keeps its canvas"
        )
        events += [
            event.type
            for out in outputs[0].outputs
            if out.request_id == "b"
            for event in out.events or ()
        ]
        stats.append(
            (
                outputs[0].scheduler_stats.num_running_reqs,
                outputs[0].scheduler_stats.num_waiting_reqs,
            )
        )
    assert ran == [["a", "b"], ["a", "b"], ["a"], ["a"], ["b"], ["b"]]
    # Its third step feeds the prompt and two blocks again, with the third.
    assert plans == [((0, 8), 0), ((4, 12), 1), ((0, 16), 2), ((12, 20), 3)]
    kinds = EngineCoreEventType
    assert events == [kinds.QUEUED, kinds.SCHEDULED, kinds.PREEMPTED, kinds.SCHEDULED]
    assert stats == [(2, 0), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0)]
    assert_empty(scheduler)


@pytest.mark.parametrize(
    ("watermark", "together"), [(0.0, 4), (0.2, 3), (0.5, 2), (0.99, 1)]
)
def test_a_watermark_leaves_room_to_grow_beside_requests_that_run(watermark, together):
    scheduler, runner = make(
        *[of_blocks(name, 1, 9) for name in "abcde"], num_blocks=9, watermark=watermark
    )
    assert len(step(scheduler, runner)[0].plans) == together


def test_a_paused_engine_ends_what_it_has_preempted():
    scheduler, runner = make(of_blocks("a", 1, 4), of_blocks("b", 1, 4), num_blocks=5)
    for _ in range(3):
        step(scheduler, runner)
    assert scheduler.num_begun == 2
    scheduler.add_request(of_blocks("new", 1, 1))
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert run(scheduler, runner)[0] == [["a"], ["b"], ["b"]]
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert run(scheduler, runner)[0] == [["new"]]


@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 30),
            st.integers(1, 40),
            st.integers(1, 40),
            st.integers(0, 2),
        ),
        min_size=2,
        max_size=12,
    ),
    aborts=st.dictionaries(st.integers(0, 60), st.integers(0, 11), max_size=4),
    num_blocks=st.integers(20, 40),
    max_rows=st.sampled_from([12, 40, 1000]),
    policy=st.sampled_from(["fcfs", "priority"]),
    watermark=st.sampled_from([0.0, 0.3]),
)
def test_every_request_ends_and_the_first_is_never_preempted(
    arrivals, aborts, num_blocks, max_rows, policy, watermark
):
    scheduler, runner = make(
        num_blocks=num_blocks,
        max_num_batched_tokens=max_rows,
        policy=policy,
        watermark=watermark,
        max_num_seqs=6,
    )
    due, aborted, lengths, received = sorted(arrivals), set(), {}, {}
    for at in range(5_000):
        while due and due[0][0] <= at:
            _, prompt, response, priority = due.pop(0)
            name = str(len(lengths))
            lengths[name] = response
            asked = {
                "gen_length": response,
                "block_length": 4,
                "steps_per_block": 2,
                "steps": None,
            }
            scheduler.add_request(
                request(
                    name, prompt_length=prompt, priority=priority, arrival=at, **asked
                )
            )
        if not due and not scheduler.has_unfinished_requests():
            break
        if str(aborts.get(at)) in scheduler.states:
            aborted.add(str(aborts[at]))
            scheduler.finish_requests(str(aborts[at]), RequestStatus.FINISHED_ABORTED)
        running = [state.request for state in scheduler.running]
        first = (
            min(running, default=None)
            if policy == "priority"
            else next(iter(running), None)
        )
        output = scheduler.schedule()
        assert first is None or first.request_id not in output.preempted_req_ids
        assert output.plans or not scheduler.has_unfinished_requests()
        assert (
            scheduler.pages.num_allocated
            <= scheduler.pages.num_reserved
            <= scheduler.pages.num_pages
        )
        assert sum(plan.max_rows for plan in output.plans.values()) <= max_rows
        for per_client in scheduler.update_from_output(
            output, runner.execute(output)
        ).values():
            for out in per_client.outputs:
                received[out.request_id] = received.get(out.request_id, 0) + len(
                    out.new_token_ids
                )
    assert all(
        received.get(name, 0) >= length
        for name, length in lengths.items()
        if name not in aborted
    )
    assert_empty(scheduler)


def test_running_requests_can_be_made_to_compute_their_pages_again():
    scheduler, runner = make(*[of_blocks(name, 1, 3) for name in "abc"], num_blocks=20)
    step(scheduler, runner)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert (scheduler.running, scheduler.pages.num_reserved) == ([], 0)
    output = scheduler.schedule()
    assert [(name, plan.span) for name, plan in output.plans.items()] == [
        (name, (0, 12)) for name in "abc"
    ]
    assert not output.new_requests
