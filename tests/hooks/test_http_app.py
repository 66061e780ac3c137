"""What vLLM's application is for one of our models, and for others."""

import pytest

from tests.support.http_app import app_client


@pytest.mark.parametrize("ours", [True, False])
def test_a_route_that_would_stop_the_engine_is_left_out(ours):
    client = app_client(ours=ours, tasks=("generate",))
    status = client.post("/scale_elastic_ep", json={"new_data_parallel_size": 2}).status_code
    assert (status == 404) is ours
