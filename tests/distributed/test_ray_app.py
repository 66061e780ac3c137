"""``examples/ray_serve_app.py`` as ``serve run`` builds it; nothing is started."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("ray.serve")


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).resolve().parents[2] / "examples" / "ray_serve_app.py"
    spec = importlib.util.spec_from_file_location("ray_serve_app", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_become_a_deployment_and_the_servers_command(example):
    settings = {"model": "some/model", "min_replicas": "2", "max_replicas": "4", "target_requests": "8"}
    options = "--cache-method sparse --max-model-len 512"
    bound = example.app(settings | {"options": options, "gpus_per_replica": "1"})._bound_deployment
    config = bound._deployment_config
    assert (config.autoscaling_config.min_replicas, config.autoscaling_config.max_replicas) == (2, 4)
    assert config.max_ongoing_requests == 16
    assert bound.ray_actor_options == {"num_cpus": 1, "num_gpus": 1}
    command, threads = bound.init_args
    assert command[0] == "some/model"
    assert '{"dllm": {"cache_method": "sparse", "cache_options": {}}}' in command
    assert command[-2:] == ["--max-model-len", "512"]
    assert threads == 1


def test_wrong_options_are_refused_before_a_replica_starts(example):
    with pytest.raises(ValueError, match="unknown cache method"):
        example.app({"options": "--cache-method magic"})
