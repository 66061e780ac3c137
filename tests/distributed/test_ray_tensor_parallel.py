"""Two tensor-parallel ranks give the tokens of one under Ray as well."""

import sys

import pytest

from tests.distributed.test_tensor_parallel import check_two_ranks
from tests.support.preloaded import preloaded_programs

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", ["none dream-tiny-a", "sdar"])
def test_two_ranks_under_ray_give_the_tokens_of_one(engines, checkpoint_of, monkeypatch, case):
    import ray

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(sys, "executable", str(preloaded_programs() / "python"))  # what Ray starts workers with
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        check_two_ranks(engines, checkpoint_of, case, backend="ray")
    finally:
        ray.shutdown()
