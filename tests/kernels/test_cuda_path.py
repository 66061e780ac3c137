"""The engine with the kernels that a GPU runs gives the tokens of the engine with those of a CPU, in every method."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.scheduler.methods import CACHE_METHODS
from tests.support import tiny_checkpoints
from tests.support.engines import generate
from tests.support.plans import SHORT_INTERVALS

pytestmark = pytest.mark.slow

MODELS = dict.fromkeys(("dual", "dkv", "maskkv", "es_dllm"), "tiny_llada") | {"block": "tiny_sdar"}
MODELS |= dict.fromkeys(("none", "prefix", "sparse", "dllm_cache", "freecache"), "tiny_dream")
SETTINGS = {"page_size": 4, "max_model_len": 64}
KERNELS = {
    "sparse": {"mean_query_scores"},
    "dllm_cache": {"similarity_sums", "write_features"},
    "maskkv": {"voting_scores"},
}
"""Kernels without which a method would not be itself, beside those that all have."""


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(tiny_checkpoints.MASK) for _ in range(length)]


def test_every_cache_method(engines, request):
    requests = [
        {"prompt": prompt(10), "params": {"gen_length": 8, "block_length": 8, "steps": 5, "ignore_eos": True}},
        {"prompt": prompt(7), "params": {"gen_length": 6, "block_length": 4, "threshold": 0.03, "ignore_eos": True}},
    ]
    tasks = [
        {
            "model": str(request.getfixturevalue(model)),
            "settings": SETTINGS
            | {"cache_method": method, "cache_options": SHORT_INTERVALS.get(method, {})}
            | {"steps_per_dispatch": 4 if recorded else 1},
            "recorded": recorded,
            "requests": requests,
        }
        for method, model in MODELS.items()
        # Triton's interpreter is slow: one method is enough to see both ways.
        for recorded in ([False, True] if method == "sparse" else [CACHE_METHODS[method].recordable])
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.cuda_path_answers"],
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
        env=os.environ | dict.fromkeys(("TRITON_INTERPRET", "TORCHDYNAMO_DISABLE"), "1"),
        cwd=Path(__file__).parents[2],
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    params = [DiffusionParams(**request["params"]) for request in requests]
    for task, result in zip(tasks, json.loads(done.stdout.splitlines()[-1]), strict=True):
        method = task["settings"]["cache_method"]
        outputs = generate(engines(task["model"], **task["settings"]), [r["prompt"] for r in requests], params)
        for output, answer in zip(outputs, result["answers"], strict=True):
            assert answer["tokens"] == list(output.outputs[0].token_ids), method
            assert answer["order"] == output.outputs[0].diffusion.unmasked_per_step, method
        called = {"rotate_", "token_statistics"} | KERNELS.get(method, set())
        if method != "none":
            called.add("paged_attention")
        assert called <= result["calls"].keys(), method
        assert bool(result["replays"]) == task["recorded"], method
