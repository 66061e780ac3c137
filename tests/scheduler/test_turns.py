"""Turns between the sequences of one HTTP request, which is their source, and the
requests of others.
"""

from vllm.v1.request import RequestStatus

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


def rows_with(planned, max_rows):
    rows = StepRows(max_rows, steps_per_dispatch=4)
    rows.begin_step(0, planned)
    return rows


def test_rows_of_a_step():
    rows = rows_with([("a", 100), ("a", 100), ("b", 30), ("c", 150)], 1600)
    assert rows.allow("a", 1000)  # its first
    rows.take("a", 100)
    assert rows.allow("a", 80)
    assert not rows.allow("a", 81)  # more than the others together
    rows.begin("d", 50)
    assert rows.allow("a", 130)
    rows.take("c", 150)
    assert rows.allow("c", 100)
    alone = rows_with([("a", 100)] * 5, 1600)
    alone.take("a", 100)
    assert alone.allow("a", 1500)
    small = rows_with([("a", 50), ("a", 50), ("b", 1)], 6400)
    small.take("a", 50)
    assert small.allow("a", 50)  # the least share of a step
    assert not small.allow("a", 51)


def test_a_source_that_begins_beside_others_rests_for_a_dispatch():
    """Then as many of its sequences begin as could have begun in each step. What others
    run meanwhile needs no scheduler.
    """
    long = {"gen_length": 80, "steps": 80, "block_length": 80}
    scheduler, runner = scheduler_with(
        request("plain", **long), max_num_seqs=100, max_num_batched_tokens=2000
    )
    step(scheduler, runner)
    short = {"steps": 1, "block_length": 8}
    for number in range(60):
        scheduler.add_request(sequence(f"a{number}", "a", **short))
    ran, num_steps = [], []
    for _ in range(10):
        output, _ = step(scheduler, runner)
        assert "plain" in output.plans
        ran.append(len(output.plans) - 1)
        num_steps.append(output.num_steps)
    # A canvas of "plain" has 90 rows, one of "a" 18.
    assert ran == [5, 0, 0, 0, 0, 0, 0, 0, 40, 0]
    assert num_steps[1:8] == [8] * 7
    scheduler.finish_requests("plain", RequestStatus.FINISHED_ABORTED)
    assert len(step(scheduler, runner)[0].plans) == 15  # alone again
    assert_empty(scheduler)


def test_sources_that_begin_together_fill_the_step_in_turn():
    many = [
        sequence(f"{source}{number}", source, steps=1, block_length=8)
        for source in "ab"
        for number in range(40)
    ]
    scheduler, runner = scheduler_with(
        *many, max_num_seqs=100, max_num_batched_tokens=18 * 24
    )
    sources = "".join(name[0] for name in step(scheduler, runner)[0].plans)
    assert sources == "ab" * 9
    run(scheduler, runner)
    assert_empty(scheduler)


def test_a_request_of_another_source_does_not_rest():
    scheduler, runner = scheduler_with("plain", max_num_seqs=10)
    for number in range(3):
        scheduler.add_request(sequence(f"a{number}", "a"))
        scheduler.add_request(sequence(f"b{number}", "b"))
    step(scheduler, runner)
    scheduler.add_request(sequence("c", "c"))
    assert "c" in step(scheduler, runner)[0].plans
    run(scheduler, runner)
    assert_empty(scheduler)
