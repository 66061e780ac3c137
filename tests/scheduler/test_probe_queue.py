"""Probes in the steps of requests: room, turns and answers."""

from vllm.v1.request import RequestStatus

from dllm_engine.decoding.probe import Probe
from tests.scheduler.test_diffusion_scheduler import (
    assert_empty,
    run,
    scheduler_with,
    step,
)


def call(scheduler, mark, number=1, num_rows=5):
    probes = [Probe([mark] * num_rows, [0], [0])] * number
    return scheduler.probes.add(f"call {mark}", probes)


def probes_of(output):
    return [probe.canvas[0] for probe in output.probes]


def marks(result):
    answers, _ = result.result(timeout=0)
    return answers and [answer.tokens[0] for answer in answers]


def test_calls_take_turns_and_get_answers_in_order():
    scheduler, runner = scheduler_with(max_num_batched_tokens=20)
    results = [call(scheduler, mark, number) for mark, number in ((1, 4), (2, 2))]
    assert scheduler.has_unfinished_requests()
    assert probes_of(step(scheduler, runner)[0]) == [1, 2, 1, 2]
    assert not results[0].done()
    assert marks(results[1]) == [2, 2]
    output, _ = step(scheduler, runner)
    assert probes_of(output) == [1, 1]
    assert output.total_num_scheduled_tokens == 10
    assert marks(results[0]) == [1] * 4
    assert not scheduler.has_unfinished_requests()


def test_beside_requests_they_take_their_share_of_rows():
    """As many as the request, which has 18, or 1/64 of a step."""
    scheduler, runner = scheduler_with("running")
    result = call(scheduler, 1, number=10)
    output, _ = step(scheduler, runner)
    assert probes_of(output) == [1] * 3
    assert [*output.plans] == ["running"]
    run(scheduler, runner)
    assert marks(result) == [1] * 10
    assert_empty(scheduler)


def test_full_steps_do_not_keep_them_waiting():
    scheduler, runner = scheduler_with(
        *"ab", max_num_batched_tokens=36, cache_method="none"
    )
    step(scheduler, runner)
    result = call(scheduler, 1, num_rows=18)
    kinds = [len(step(scheduler, runner)[0].plans) for _ in range(3)]
    assert sorted(kinds[:2]) == [1, 2]
    assert marks(result) == [1]
    run(scheduler, runner)
    assert_empty(scheduler)


def test_a_canvas_that_is_longer_than_a_step_has_one_of_its_own():
    scheduler, runner = scheduler_with("a", max_num_batched_tokens=18)
    result = call(scheduler, 1, num_rows=30)
    run(scheduler, runner)
    assert marks(result) == [1]


def test_a_call_that_is_dropped_has_no_answers():
    scheduler, runner = scheduler_with(max_num_batched_tokens=5)
    left, stays = (call(scheduler, mark, number=2) for mark in (1, 2))
    output = scheduler.schedule()
    assert probes_of(output) == [1]
    scheduler.probes.drop("call 1")
    scheduler.probes.drop("call 1")
    assert marks(left) is None
    scheduler.update_from_output(output, runner.execute(output))
    run(scheduler, runner)
    assert marks(stays) == [2, 2]


def test_weights_that_change_drop_all():
    scheduler, runner = scheduler_with("a", max_num_batched_tokens=18)
    result = call(scheduler, 1)
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    scheduler.probes.drop_all()
    scheduler.weights.begin_change("reload_weights", breaks=True)
    assert result.result(timeout=0) == (None, 0)
    run(scheduler, runner)
    assert_empty(scheduler)
