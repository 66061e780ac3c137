"""Rows of the table in ``docs/quantization.md`` are what ``dllm plan`` computes."""

import re
from pathlib import Path

import pytest

from dllm_engine.memory.capacity import Deployment, plan
from dllm_engine.options import EngineOptions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quantization.md"
MODELS = {
    "LLaDA-8B": "GSAI-ML/LLaDA-8B-Instruct",
    "Dream-7B": "Dream-org/Dream-v0-Instruct-7B",
    "LLaDA-MoE": "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
}
WEIGHTS = {"bfloat16": None, "INT8, FP8": "int8", "INT4": "int4"}
ROW = re.compile(r"^\| (\S+) \| ([^|]+) \| (\d+) \+ (\d+) \| ([\d/ –|]+) \|$", re.MULTILINE)
SIZES = [8, 12, 16, 24]
"""Of GPUs, in GiB: a column each."""


@pytest.mark.parametrize("row", ROW.findall(PAGE.read_text(encoding="utf-8"))[::9], ids=lambda row: " ".join(row[:4]))
def test_a_row_is_that_of_the_plans(row):
    model, weights, prompt, response, cells = row
    settings = {"model": MODELS[model], "quantization": WEIGHTS[weights], "max_num_batched_tokens": 2048}
    settings |= {"prompt": int(prompt), "response": int(response)}

    def requests(method, size):
        options = EngineOptions(cache_method=method)
        try:
            return str(plan(Deployment(**settings, gpu_memory=size << 30, options=options)).demand.requests)
        except ValueError:
            return "0"

    found = [" / ".join(requests(method, size) for method in ("dual", "sparse")) for size in SIZES]
    assert [cell.replace("–", "0 / 0") for cell in cells.split(" | ")] == found
