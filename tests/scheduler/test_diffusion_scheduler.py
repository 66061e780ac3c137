"""The scheduler alone: real requests and messages, a stand-in for the model runner."""

import random
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from dllm_engine import DiffusionParams
from dllm_engine.decisions.answering import COUNTS
from dllm_engine.decoding.messages import DiffusionRunnerOutput, StepReport
from dllm_engine.decoding.probe import Logprobs
from dllm_engine.families import LLADA
from dllm_engine.scheduler.diffusion_scheduler import DiffusionScheduler
from dllm_engine.scheduler.engine_stats import EngineStats, take_stats
from dllm_engine.structured_output.automata import take_counts
from dllm_engine.vllm_hooks.metrics import METRICS

HF_CONFIG = SimpleNamespace(
    family=LLADA,
    eos_token_id=141,
    num_hidden_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=2,
)
SCHEDULING = {
    "max_num_seqs": 4,
    "max_num_active_seqs": None,
    "max_num_batched_tokens": 1000,
    "policy": "fcfs",
    "watermark": 0.0,
    "enable_chunked_prefill": True,
}


class StandInRunner:
    """Reports of steps that unmask what was asked. The first token of a probe is its
    answer.
    """

    def __init__(self) -> None:
        self.masked: dict[str, int] = {}

    def execute(self, output):
        reports = {}
        for request_id, plan in output.plans.items():
            left = (self.masked.get(request_id) or plan.window.size) - plan.quota.count
            self.masked[request_id] = left
            reports[request_id] = StepReport(
                plan=plan,
                rows_computed=plan.max_rows,
                num_unmasked=plan.quota.count,
                masked=[left],
                tokens=None if left else [7] * plan.window.size,
                trace=None,
            )
        answers = [Logprobs([float(probe.canvas[0])], [0.0]) for probe in output.probes]
        return DiffusionRunnerOutput(
            req_ids=[], req_id_to_index={}, reports=[reports], probe_answers=answers
        )


def scheduler_with(
    *requests,
    hf_config=HF_CONFIG,
    num_pages=100,
    log_stats=False,
    finished_sets=False,
    **settings,
):
    """A scheduler with these requests, some named only, and a runner for it.
    ``settings``: of vLLM's scheduler, or options of the engine."""
    scheduling = {
        name: settings.pop(name, default) for name, default in SCHEDULING.items()
    }
    config = SimpleNamespace(
        additional_config={"dllm": settings},
        model_config=SimpleNamespace(hf_config=hf_config, seed=0),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(**scheduling),
    )
    scheduler = DiffusionScheduler(
        config,
        SimpleNamespace(num_blocks=num_pages, kv_cache_groups=[]),
        structured_output_manager=None,
        block_size=16,
        hash_block_size=16,
        log_stats=log_stats,
        include_finished_set=finished_sets,
    )
    for each in requests:
        scheduler.add_request(request(each) if isinstance(each, str) else each)
    return scheduler, StandInRunner()


def request(
    name: str, *, prompt_length=10, priority=0, arrival=0.0, client=0, **settings
) -> Request:
    params = DiffusionParams(
        **{"gen_length": 8, "block_length": 4, "steps": 4} | settings
    )
    prompt = list(range(1, prompt_length + 1))
    return Request(
        name,
        prompt,
        params,
        None,
        priority=priority,
        arrival_time=arrival,
        client_index=client,
    )


def step(scheduler, runner):
    """What one step runs, and the outputs per client."""
    output = scheduler.schedule()
    return output, scheduler.update_from_output(output, runner.execute(output))


def run(scheduler, runner):
    """Ids that ran in each step, and the tokens of each request, until all is done."""
    ran, tokens = [], {}
    while scheduler.has_unfinished_requests():
        output, outputs = step(scheduler, runner)
        ran.append([*output.plans])
        for per_client in outputs.values():
            for out in per_client.outputs:
                tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
        assert len(ran) < 10_000
    return ran, tokens


def assert_empty(scheduler) -> None:
    assert not scheduler.states
    assert scheduler.get_request_counts() == (0, 0)
    assert scheduler.pages.num_reserved == scheduler.pages.num_allocated == 0


def test_priority_goes_before_arrival_and_arrival_breaks_ties():
    priorities = {"late": 5, "soon too": 1, "soon": 1, "sooner": -1}
    requests = [
        request(name, priority=number, arrival=float(len(name)))
        for name, number in priorities.items()
    ]
    scheduler, runner = scheduler_with(*requests, max_num_seqs=1, policy="priority")
    ran, _ = run(scheduler, runner)
    order = list(dict.fromkeys(name for ids in ran for name in ids))
    assert order == ["sooner", "soon", "soon too", "late"]


def test_rows_never_exceed_the_budget_and_nobody_starves():
    """Of requests with a cache: many fit together until their refreshes coincide."""
    rng = random.Random(0)
    requests = [
        request(f"r{i}", prompt_length=rng.choice([1, 5, 20, 40, 92]))
        for i in range(30)
    ]
    cached = {"cache_method": "dual", "refresh_ratio": None, "num_pages": 1000}
    scheduler, runner = scheduler_with(
        *requests, max_num_seqs=8, max_num_batched_tokens=100, **cached
    )
    waited: dict[str, int] = {}
    longest_wait = 0
    while scheduler.has_unfinished_requests():
        output, _ = step(scheduler, runner)
        assert 0 < output.total_num_scheduled_tokens <= 100
        for running in scheduler.running:
            name = running.request_id
            waited[name] = 0 if name in output.plans else waited[name] + 1
            longest_wait = max(longest_wait, waited[name])
    assert 0 < longest_wait < 8, (
        "each of 8 running requests is the one left out longest within 8 steps"
    )


def test_head_of_the_queue_is_not_overtaken_by_a_smaller_request():
    scheduler, runner = scheduler_with(
        request("running", prompt_length=30), max_num_batched_tokens=60
    )  # 38 rows
    step(scheduler, runner)
    scheduler.add_request(request("large", prompt_length=40))
    scheduler.add_request(request("small", prompt_length=2))
    assert step(scheduler, runner)[0].plans.keys() == {"running"}


def test_abort_of_all_and_of_strangers():
    scheduler, runner = scheduler_with(*"abcd", max_num_seqs=2)
    step(scheduler, runner)
    assert scheduler.finish_requests(["stranger"], RequestStatus.FINISHED_ABORTED) == []
    assert (
        len(scheduler.finish_requests(["a", "a"], RequestStatus.FINISHED_ABORTED)) == 1
    )
    assert len(scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)) == 3
    assert_empty(scheduler)
    assert scheduler.has_requests(), "the runner has yet to be told"
    assert scheduler.schedule().finished_req_ids == set("abcd")
    assert not scheduler.has_requests()


def test_id_in_use_is_refused_and_can_be_used_again_afterwards():
    scheduler, runner = scheduler_with(request("a", client=0), request("a", client=1))
    _, outputs = step(scheduler, runner)
    (refused,) = outputs[1].outputs
    assert refused.finish_reason == FinishReason.ERROR
    assert "'a' is running already" in refused.kv_transfer_params["diffusion"]["error"]
    run(scheduler, runner)
    scheduler.schedule()
    scheduler.add_request(request("a"))
    assert run(scheduler, runner)[1] == {"a": [7] * 8}


def test_seeds_of_requests_that_name_none_differ_and_repeat_with_the_engine():
    def seeds() -> list[int]:
        return [
            new.seed
            for new in scheduler_with(*"abc")[0].schedule().new_requests.values()
        ]

    assert len(set(seeds())) == 3
    assert seeds() == seeds()


def test_a_long_request_refreshes_as_much_as_short_ones_run_and_once_more():
    """Four requests with blocks of 4 rows and canvases of 50, which one of 300 rows
    joins.
    """
    old = [request(f"old {i}", gen_length=40, steps=40) for i in range(4)]
    scheduler, runner = scheduler_with(
        *old, max_num_seqs=5, cache_method="dual", refresh_ratio=1.0
    )
    for _ in range(5):
        step(scheduler, runner)
    scheduler.add_request(request("new", prompt_length=260, gen_length=40, steps=40))
    refreshed, others = [], []
    """Rows in each step: of the new request where it refreshes, and of all others."""
    while scheduler.has_unfinished_requests():
        output, _ = step(scheduler, runner)
        new = output.plans.get("new")
        refreshed.append(
            new.max_rows if new is not None and new.state.value != "reuse" else 0
        )
        others.append(
            sum(plan.max_rows for name, plan in output.plans.items() if name != "new")
        )
    assert_empty(scheduler)
    num_beside = len([rows for rows in others if rows])
    for start in range(num_beside):
        for stop in range(start, num_beside):
            assert sum(refreshed[start:stop]) <= sum(others[start:stop]) + 300
    # Four steps of the others take 248 rows, a refresh is 300. When they are done it
    # owes nobody.
    assert [i for i, rows in enumerate(refreshed) if rows] == [
        0,
        8,
        16,
        24,
        32,
        36,
        40,
        44,
        48,
        52,
    ]


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 200), st.sampled_from([4, 8, 20])),
        min_size=1,
        max_size=12,
    ),
    ratio=st.sampled_from([0.01, 0.5, 1.0, 100.0, None]),
    max_rows=st.sampled_from([220, 500, 10_000]),
    method=st.sampled_from(["dual", "sparse", "dllm_cache", "none"]),
)
@settings(max_examples=40, deadline=None)
def test_every_request_ends_whatever_the_bound(arrivals, ratio, max_rows, method):
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": max_rows, "num_pages": 5000}
    scheduler, runner = scheduler_with(
        **limits, cache_method=method, refresh_ratio=ratio
    )
    due = sorted(arrivals)
    for at in range(20_000):
        while due and due[0][0] <= at:
            _, prompt_length, gen_length = due.pop(0)
            asked = {
                "prompt_length": prompt_length,
                "gen_length": gen_length,
                "steps": gen_length // 2,
            }
            scheduler.add_request(request(str(len(due)), **asked))
        if not due and not scheduler.has_unfinished_requests():
            break
        output, _ = step(scheduler, runner)
        assert output.plans or not scheduler.has_unfinished_requests()
        rows = [plan.max_rows for plan in output.plans.values()]
        assert output.total_num_scheduled_tokens == sum(rows) <= max_rows
        assert len(rows) <= limits["max_num_seqs"]
    assert_empty(scheduler)


def test_finished_ids_go_to_the_client_that_asked():
    requests = [
        request(name, client=client, gen_length=4, steps=1)
        for client, name in enumerate("abc")
    ]
    scheduler, runner = scheduler_with(
        *requests[:2], finished_sets=True, log_stats=True
    )
    _, outputs = step(scheduler, runner)
    assert [outputs[client].finished_requests for client in (0, 1)] == [{"a"}, {"b"}]
    assert (
        sum(per_client.scheduler_stats is not None for per_client in outputs.values())
        == 1
    ), "one gets the stats"
    scheduler.add_request(requests[2])
    _, outputs = step(scheduler, runner)
    assert {
        client for client, per_client in outputs.items() if per_client.finished_requests
    } == {2}


def messages(*names, **settings):
    """What each step reports, until all requests are done."""
    scheduler, runner = scheduler_with(*names, log_stats=True, **settings)
    while scheduler.has_unfinished_requests():
        _, outputs = step(scheduler, runner)
        (per_client,) = outputs.values()
        yield take_stats(per_client.scheduler_stats)


def test_every_metric_is_counted():
    in_front_end = {*take_counts(), *COUNTS}
    assert METRICS.keys() == vars(EngineStats()).keys() | in_front_end


def test_pages_and_retained_tokens_come_and_go_with_their_request():
    # Canvas 18, blocks of 4: 14 tokens outside, 4 pages in each of 2 layers.
    reported = list(messages("a", cache_method="dual", page_size=4))
    assert [m["denoising_steps"] for m in reported] == [{"update": 1}, {"reuse": 1}] * 2
    assert [m["pages_reserved"] for m in reported] == [8, 8, 8, 0]
    assert [m["pages_allocated"] for m in reported] == [8, 8, 8, 0]
    assert [m["tokens_retained"] for m in reported] == [14, 14, 14, 0]
    assert [(m["eviction_retained"], m["eviction_candidates"]) for m in reported] == [
        (14, 14),
        (0, 0),
    ] * 2
    assert reported[-1]["request_pages_held"] == [8]
    # A method that keeps the running block has the whole canvas as candidates.
    first = next(messages("a", cache_method="dkv"))
    assert (first["eviction_retained"], first["eviction_candidates"]) == (18, 18)
