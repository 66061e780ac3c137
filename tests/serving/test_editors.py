"""Routes of editors in the metrics of a server, and after clients that hang up."""

import asyncio
import urllib.request
from contextlib import suppress
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.editors.test_routes import BODIES
from tests.serving.test_load import wait_until_idle
from tests.support.server import DEMO_SERVER

pytestmark = pytest.mark.slow

HANG_UPS = 30


def counted(url: str) -> dict[Any, float]:
    """Requests of each route that were answered."""
    text = urllib.request.urlopen(url + "/metrics", timeout=30).read().decode()
    return {
        sample.labels["handler"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "http_requests_total" and sample.labels["status"] == "2xx"
    }


def test_each_route_is_counted(servers):
    url = servers("dllm", *DEMO_SERVER).url
    before = counted(url)
    for path, body in BODIES.items():
        assert httpx.post(url + path, json=body, timeout=60).status_code == 200
    after = counted(url)
    assert {
        path: after[path] - before.get(path, 0) for path in BODIES
    } == dict.fromkeys(BODIES, 1)


def test_keystrokes_that_cancel_leave_nothing_behind(servers):
    url = servers("dllm", *DEMO_SERVER).url

    async def type_on() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for number in range(HANG_UPS):
                path, body = list(BODIES.items())[number % len(BODIES)]
                post = client.post(path, json=body | {"stream": True})
                with suppress(TimeoutError):
                    await asyncio.wait_for(post, 0.003 * number)

    asyncio.run(type_on())
    wait_until_idle(url)
