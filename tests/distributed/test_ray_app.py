"""``examples/ray_serve_app.py`` without a cluster: what a replica does."""

import argparse
import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_replica_whose_engine_died_ends_with_the_request(monkeypatch):
    pytest.importorskip("ray.serve")
    spec = importlib.util.spec_from_file_location("ray_serve_app", EXAMPLES / "ray_serve_app.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    ended = []
    monkeypatch.setattr(example.os, "_exit", ended.append)

    async def application(scope, receive, send):
        await send(scope["path"])

    async def send(message):
        sent.append(message)

    sent = []
    replica = example.DiffusionServer(argparse.Namespace())
    replica.application, replica.engine = application, SimpleNamespace(errored=False)
    for errored in (False, True):
        replica.engine.errored = errored
        asyncio.run(replica({"type": "http", "path": "/p"}, None, send))
    assert sent == ["/p", "/p"]
    assert ended == [1]
