"""What the scheduler counts for the metrics."""

from dllm_engine.metrics import METRICS
from dllm_engine.scheduler.engine_stats import EngineStats, take_stats
from dllm_engine.structured_output.automata import take_counts
from tests.scheduler.test_diffusion_scheduler import scheduler_with, step


def messages(*names, **settings):
    """What each step reports, until all requests are done."""
    scheduler, runner = scheduler_with(*names, log_stats=True, **settings)
    while scheduler.has_unfinished_requests():
        _, outputs = step(scheduler, runner)
        (per_client,) = outputs.values()
        yield take_stats(per_client.scheduler_stats)


def test_every_metric_is_counted():
    assert METRICS.keys() == EngineStats().to_message().keys() | take_counts().keys()


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
