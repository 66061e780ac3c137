"""The metrics of a real engine agree with its requests' figures; dashboard and page
name metrics that exist.
"""

import json
import re
from typing import Any

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.vllm_hooks.metrics import METRICS, PREFIX
from dllm_engine.vllm_hooks.server.open_requests import HTTP_ERRORS
from dllm_engine.vllm_hooks.server.stop import ServerStopping
from tests.support.checkout import DOCS
from tests.support.engines import generate
from tests.support.http_app import app_client

PROMPTS = [list(range(1, 40)), [5, 6, 7], list(range(3, 90))]


@pytest.fixture(scope="module")
def measured(engines, tiny_llada):
    """(figures of some requests, the metrics after them, by name)."""
    llm = engines(
        tiny_llada,
        cache_method="sparse",
        cache_options={"retention_ratio": 0.4},
        page_size=8,
        disable_log_stats=False,
    )
    params = DiffusionParams(gen_length=32, block_length=8, steps=16, ignore_eos=True)
    figures = [output.outputs[0].diffusion for output in generate(llm, PROMPTS, params)]
    metrics: dict = {}
    for metric in llm.get_metrics():
        state = metric.labels.get("refresh_state")
        metrics[(metric.name, state) if state else metric.name] = metric
    return figures, metrics


def test_counters_are_the_sums_of_the_figures(measured):
    figures, metrics = measured
    assert metrics["vllm:diffusion_num_committed_tokens"].value == sum(
        f.tokens_unmasked for f in figures
    )
    assert metrics["vllm:dllm_tokens_computed"].value == sum(
        f.tokens_computed for f in figures
    )
    for state in ("full", "update", "reuse"):
        expected = sum(f.refresh_states.count(state) for f in figures)
        assert metrics["vllm:dllm_denoising_steps", state].value == expected > 0, state
    assert metrics["vllm:dllm_engine_steps"].value == 16, (
        "the requests shared every batch"
    )


def test_evicted_is_what_was_not_retained_and_pages_of_requests_that_ended_are_counted(
    measured,
):
    figures, metrics = measured
    outside = [len(prompt) + 24 for prompt in PROMPTS]
    assert [f.tokens_retained for f in figures] == [int(n * 0.4) for n in outside]
    assert metrics["vllm:dllm_eviction_candidates"].value == 4 * sum(outside)
    assert metrics["vllm:dllm_eviction_retained"].value == 4 * sum(
        f.tokens_retained for f in figures
    )
    pages = [f.pages_held for f in figures]
    assert pages == [2 * -(-f.tokens_retained // 8) for f in figures], "in two layers"
    pages_held = metrics["vllm:dllm_request_pages_held"]
    assert (pages_held.count, pages_held.sum) == (3, sum(pages))
    assert pages_held.buckets["+Inf"] == 3
    assert metrics["vllm:dllm_request_tokens_per_forward"].sum == 3 * 2.0


def test_nothing_is_held_when_nothing_runs_and_labels_are_vllms(measured):
    _, metrics = measured
    assert metrics["vllm:dllm_pages_total"].value > 0
    for name in ("pages_reserved", "pages_allocated", "tokens_retained"):
        assert metrics[f"vllm:dllm_{name}"].value == 0
    assert (
        metrics["vllm:dllm_pages_total"].labels
        == metrics["vllm:kv_cache_usage_perc"].labels
    )
    assert set(metrics["vllm:dllm_pages_total"].labels) == {"model_name", "engine"}


def exposed(name) -> str:
    spec = METRICS[name]
    return PREFIX[spec.of_vllm] + name + ("_total" if spec.kind == "counter" else "")


def test_the_page_lists_every_metric():
    page = (DOCS / "metrics.md").read_text()
    rows = re.findall(
        r"^\| `(vllm:\w+)` \| (\w+) \| (.*?) \| (.*) \|$", page, flags=re.MULTILINE
    )
    assert rows == [
        (exposed(name), spec.kind, spec.unit, spec.meaning)
        for name, spec in METRICS.items()
    ]


def series_of(name) -> set[str]:
    ends = ("_bucket", "_sum", "_count") if METRICS[name].kind == "histogram" else ("",)
    return {exposed(name) + end for end in ends}


def asked_by_status(dashboard: str) -> list[str]:
    return re.findall(r'dllm_http_errors_total\{status=~\\"(.*?)\\"', dashboard)


def test_http_errors_are_counted_by_status_also_while_the_server_ends():
    client: Any = app_client()
    errors = HTTP_ERRORS.labels
    before = [errors(status)._value.get() for status in (404, 503)]
    client.get("/nowhere")
    client.app.state.open_requests.error = ServerStopping()
    client.post("/v1/decisions", json={})
    shown = client.get("/metrics").text
    for status, count in zip((404, 503), before, strict=True):
        assert f'dllm_http_errors_total{{status="{status}"}} {count + 1}' in shown


def test_the_dashboard_asks_for_metrics_that_exist_and_shows_them_all():
    dashboard = (DOCS / "grafana" / "dllm-engine.json").read_text()
    asked = set(re.findall(r"vllm:(?:dllm|diffusion)_\w+", dashboard))
    assert asked <= set().union(*map(series_of, METRICS))
    assert all(asked & series_of(name) for name in METRICS)
    assert asked_by_status(dashboard) == ["4..", "5.."]
    panels = json.loads(dashboard)["panels"]
    assert all(panel["targets"] and panel["title"] for panel in panels)
    assert len({panel["id"] for panel in panels}) == len(panels)
