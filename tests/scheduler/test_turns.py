"""Turns between the sequences of one HTTP request, which is their source, and the
requests of others.
"""

from dllm_engine.request_options.sampling_params import SOURCE
from dllm_engine.scheduler.step_rows import StepRows
from tests.scheduler.test_diffusion_scheduler import (
    assert_empty,
    request,
    run,
    scheduler_with,
    step,
)


def sequence(name, source, **settings):
    return request(name, **settings, extra_args={SOURCE: source.encode()})


def first_runs(ran):
    return list(dict.fromkeys(name for ids in ran for name in ids))


def test_a_request_waits_for_one_sequence_of_each_other_source():
    many = [sequence(f"a{number}", "a") for number in range(5)] + [
        sequence(f"b{number}", "b") for number in range(3)
    ]
    scheduler, runner = scheduler_with(*many, "plain", max_num_seqs=1)
    ran, _ = run(scheduler, runner)
    assert first_runs(ran) == ["a0", "b0", "plain", "a1", "b1", "a2", "b2", "a3", "a4"]
    assert_empty(scheduler)


def test_a_request_that_comes_later_stands_before_what_is_left_of_a_source():
    scheduler, runner = scheduler_with(
        *(sequence(f"a{number}", "a") for number in range(6)), max_num_seqs=1
    )
    ran = []
    while "a3" not in first_runs(ran):
        ran.append([*step(scheduler, runner)[0].plans])
    scheduler.add_request(request("late"))
    scheduler.add_request(request("later"))
    ran += run(scheduler, runner)[0]
    assert first_runs(ran) == ["a0", "a1", "a2", "a3", "a4", "late", "later", "a5"]


def test_turns_are_those_of_a_priority():
    many = [sequence(f"a{number}", "a", arrival=1.0) for number in range(3)]
    others = [
        request("urgent", priority=-1, arrival=3.0),
        request("plain", arrival=2.0),
    ]
    scheduler, runner = scheduler_with(
        *many, *others, max_num_seqs=1, policy="priority"
    )
    assert first_runs(run(scheduler, runner)[0]) == [
        "urgent",
        "a0",
        "plain",
        "a1",
        "a2",
    ]


def test_a_source_leaves_room_for_others():
    """Sequences, rows (a canvas has 18) and pages. Its first sequence begins in any
    case.
    """
    for limit in ({"max_num_seqs": 8}, {"max_num_batched_tokens": 8 * 18}):
        settings = {"max_num_seqs": 100} | limit
        scheduler, runner = scheduler_with(
            *(sequence(f"a{number}", "a") for number in range(20)), **settings
        )
        assert len(step(scheduler, runner)[0].plans) == 6
        scheduler.add_request(request("plain"))
        assert "plain" in step(scheduler, runner)[0].plans
        run(scheduler, runner)
        assert_empty(scheduler)
    scheduler, runner = scheduler_with(
        *(sequence(f"a{number}", "a") for number in range(20)),
        max_num_batched_tokens=18,
    )
    assert first_runs(run(scheduler, runner)[0]) == [
        f"a{number}" for number in range(20)
    ]


def test_a_request_runs_in_every_step_beside_a_source_that_fills_them():
    many = [
        sequence(f"a{number}", "a", gen_length=80, steps=80, block_length=80)
        for number in range(40)
    ]
    scheduler, runner = scheduler_with(
        *many, max_num_seqs=40, max_num_batched_tokens=2000
    )
    assert len(step(scheduler, runner)[0].plans) == 16
    scheduler.add_request(request("plain"))
    assert "plain" in step(scheduler, runner)[0].plans
    for _ in range(3):
        output = step(scheduler, runner)[0]
        assert "plain" in output.plans
        assert output.total_num_scheduled_tokens <= 18 + 2000 / 16
    ran, tokens = run(scheduler, runner)
    assert len(tokens) == 40
    assert max(map(len, ran)) > 10  # alone again, it fills the steps
    assert_empty(scheduler)


def test_rows_of_a_step():
    rows = StepRows([("a", 100), ("a", 100), ("b", 30), ("c", 150)], 1600)
    assert rows.allow("a", 1000)  # its first
    rows.take("a", 100)
    assert rows.allow("a", 80)
    assert not rows.allow("a", 81)  # more than the others together
    rows.admit("d", 50)
    assert rows.allow("a", 130)
    rows.take("c", 150)
    assert rows.allow("c", 100)
    alone = StepRows([("a", 100)] * 5, 1600)
    alone.take("a", 100)
    assert alone.allow("a", 1500)
    small = StepRows([("a", 50), ("a", 50), ("b", 1)], 6400)
    small.take("a", 50)
    assert small.allow("a", 50)  # the least share of a step
    assert not small.allow("a", 51)
