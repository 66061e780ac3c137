"""What the scheduler counts for the metrics, and how it rides on vLLM's message."""

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dllm_engine.scheduler.engine_stats import STATS_KEY, EngineStats, take_stats
from dllm_engine.structured_output.automata import take_counts
from dllm_engine.vllm_hooks.metrics import METRICS
from tests.scheduler.test_diffusion_scheduler import scheduler_with, step


def messages(*names, **settings):
    """What each step reports, until all requests are done."""
    scheduler, runner = scheduler_with(*names, log_stats=True, **settings)
    while scheduler.has_unfinished_requests():
        _, outputs = step(scheduler, runner)
        (per_client,) = outputs.values()
        yield take_stats(per_client.scheduler_stats)


def test_every_metric_is_counted():
    assert METRICS.keys() == vars(EngineStats()).keys() | take_counts().keys()


def test_pages_and_retained_tokens_come_and_go_with_their_request():
    # Canvas 18, blocks of 4: 14 tokens outside, 4 pages in each of 2 layers.
    reported = list(messages("a", cache_method="dual", page_size=4))
    assert [m["denoising_steps"] for m in reported] == [{"update": 1}, {"reuse": 1}] * 2
    assert [m["pages_reserved"] for m in reported] == [8, 8, 8, 0]
    assert [m["pages_allocated"] for m in reported] == [8, 8, 8, 0]
    assert [m["tokens_retained"] for m in reported] == [14, 14, 14, 0]
    assert [(m["eviction_retained"], m["eviction_candidates"]) for m in reported] == [(14, 14), (0, 0)] * 2
    assert reported[-1]["request_pages_held"] == [8]
    # A method that keeps the running block has the whole canvas as candidates.
    first = next(messages("a", cache_method="dkv"))
    assert (first["eviction_retained"], first["eviction_candidates"]) == (18, 18)


def test_the_message_survives_vllms_wire():
    stats = EngineStats(engine_steps=3, request_pages_held=[4], tokens_retained=9)
    stats.denoising_steps["update"] += 2
    scheduler_stats = SchedulerStats(num_running_reqs=1)
    scheduler_stats.kv_connector_stats = {STATS_KEY: vars(stats)}
    wire = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=scheduler_stats))
    received = MsgpackDecoder(EngineCoreOutputs).decode(wire).scheduler_stats
    assert take_stats(received) == vars(stats)
    assert received == SchedulerStats(num_running_reqs=1), "vLLM's loggers find nothing of ours"
