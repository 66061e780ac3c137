"""Predicted step times count what steps do, and say so where they cannot."""

import json
import re
from collections import Counter
from dataclasses import astuple, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_engine import DiffusionParams
from dllm_engine.bench.floor import Floor, PassShape
from dllm_engine.checkpoints import load_config
from dllm_engine.memory.deployment import Deployment, SizingError
from dllm_engine.memory.weights import layers_by_kind
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.speed import prediction
from dllm_engine.speed.gpus import COMPILED_TILES, GPUS, programs_at_once
from dllm_engine.speed.kernels import Decoder, Kernel
from dllm_engine.speed.prediction import predict
from tests.support.engines import runner_of, scheduler_of
from tests.support.plans import FULL_METHODS

CHECKOUT = Path(__file__).resolve().parents[2]
LLADA, DREAM = "GSAI-ML/LLaDA-8B-Instruct", "Dream-org/Dream-v0-Instruct-7B"
LLADA_MOE = "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"
METHODS = [name for name, method in FULL_METHODS.items() if method.launches is not None]
SDAR, BLOCK_METHODS = "JetLM/SDAR-8B-Chat", ["none", "block"]


def predicted(model=LLADA, gpu="H200", batches=(1, 8, 64), steps=None, method="none", **changes):
    lengths = {"prompt": 512, "response": 64, "memory": 0} | changes
    return predict(Deployment(model, options=EngineOptions(cache_method=method), **lengths), gpu, batches, steps)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_bytes_and_flops_of_the_floor_are_those_that_bench_measures(engines, request, family, monkeypatch):
    path = request.getfixturevalue(f"tiny_{family}")
    model = runner_of(engines(path)).model
    counted = Counter()

    def count(weight_numbers, flops):
        counted.update(bytes=4 * weight_numbers, flops=flops)

    def counting(forward, x, *rest):
        out = forward(x, *rest)
        width = (out if isinstance(out, torch.Tensor) else out[0]).shape[-1]
        count(x.shape[-1] * width, 2 * x.numel() * width)
        return out

    def attend(q, k, v, **_):
        count(2 * k.numel(), 4 * q.numel() * k.shape[-2])

    for layer in model.layers:
        for linear in (layer.qkv_proj, layer.out_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            monkeypatch.setattr(linear, "forward", lambda *a, forward=linear.forward: counting(forward, *a))
    head = model.lm_head.quant_method
    monkeypatch.setattr(head, "apply", lambda of, x, apply=head.apply: counting(lambda x: apply(of, x), x))
    shape = PassShape(((8, 56), (8, 56), (8, 56)), head_rows=5)
    with mock.patch.object(F, "scaled_dot_product_attention", attend):
        Floor(model, shape).seconds()
    decoder = Decoder(load_config(str(path)), 4)
    kernels = decoder.layer(shape, GPUS["H200"], 0, 0) * decoder.config.num_hidden_layers + decoder.ends(shape)
    assert counted == {"bytes": sum(k.required for k in kernels), "flops": sum(k.flops for k in kernels)}


class CountsLaunches(TorchDispatchMode):
    """Counts the operators that launch a kernel on a GPU."""

    def __init__(self):
        super().__init__()
        self.launched = Counter()
        # Two kernels; and a GPU's activation is one with the product behind it.
        self.several = {"dllm::mean_query_scores": 2, "aten::silu": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, out = func.name().partition(".")[0], func(*args, **(kwargs or {}))
        copies = name == "aten::contiguous" and out.data_ptr() != args[0].data_ptr()
        if copies or not (func.is_view or "empty" in name):
            self.launched[name] += self.several.get(name, 1)
        return out


@pytest.mark.parametrize("method", [*METHODS, "block"])
def test_launches_are_those_of_the_layer_passes(engines, tiny_llada, tiny_sdar, method):
    path = tiny_llada if method in METHODS else tiny_sdar
    llm = engines(path, cache_method=method, enable_prefix_caching=False, cuda_graphs=False)
    forward, decoder = runner_of(llm).denoiser.forward, Decoder(load_config(str(path)), 4)
    seen = set()
    assert runner_of(llm).model.rotary_table is not None  # made once, not in a step
    assert runner_of(llm).pages is None or runner_of(llm).pages.heads is not None  # so are these

    def counting(batch, layer_pass):
        with CountsLaunches() as counts:
            out = forward(batch, layer_pass)
        plan = batch.plans[0]
        canvas_length = batch.canvases[0].spec.canvas_length
        shape = PassShape.of_plans([plan], [batch.num_rows(0)], [canvas_length], head_rows=1)
        layer = decoder.layer(shape, GPUS["H200"], CACHE_METHODS[method].launches.get(plan.state, 0), 1)
        tokens_embedding_and_sum = 3
        # A prompt of several blocks attends alone, with limits, to no tokens in pages.
        counts.launched.pop("aten::zeros", None)
        assert counts.launched.total() == decoder.config.num_hidden_layers * len(layer) + tokens_embedding_and_sum, (
            counts.launched
        )
        seen.add(plan.state)
        return out

    with mock.patch.object(runner_of(llm).denoiser, "forward", counting):
        llm.generate([{"prompt_token_ids": [5] * 40}], DiffusionParams(gen_length=16, block_length=8, ignore_eos=True))
    assert not scheduler_of(llm).states
    assert seen >= set(CACHE_METHODS[method].launches)


@pytest.mark.parametrize(
    "model", [LLADA, LLADA_MOE, DREAM, SDAR, "JetLM/SDAR-30B-A3B-Chat", "inclusionAI/LLaDA2.0-mini"]
)
@pytest.mark.parametrize("gpu", GPUS)
def test_no_step_is_below_its_floor_and_replaying_is_no_slower(model, gpu):
    result = predicted(model, gpu)
    methods = METHODS if model in (LLADA, LLADA_MOE, DREAM) else BLOCK_METHODS
    assert list(dict.fromkeys(speed.cache_method for speed in result.speeds)) == methods
    for step in result.steps:
        assert 0 < step.seconds.floor < step.seconds.recorded <= step.seconds.launched
    for speed in result.speeds:
        assert speed.tokens_per_second.floor > speed.tokens_per_second.recorded >= speed.tokens_per_second.launched


def test_a_row_reads_and_computes_its_experts_and_many_rows_read_all():
    decoder = Decoder(load_config(LLADA_MOE), 2)
    ((_, experts),) = layers_by_kind(decoder.config)
    expert, beside = 3 * 2048 * 1024, 4 * 2048**2 + 64 * 2048

    def layer(rows: int) -> list[Kernel]:
        return decoder.layer(PassShape(((rows, rows),), 0), GPUS["H200"], 0, 0, experts)

    for rows, read in ((1, 8), (10_000, 64)):
        keys_and_values = 2 * rows * 2048
        assert sum(k.required for k in layer(rows)) == pytest.approx(2 * (beside + keys_and_values + read * expert))
        computed = rows * (beside + 8 * expert) + 2 * rows**2 * 2048
        assert sum(k.flops for k in layer(rows)) == pytest.approx(2 * computed)


@pytest.mark.parametrize("better", [{"bandwidth": 9e12}, {"flops": 2e15}, {"shared_memory": 300, "registers": 1 << 17}])
def test_more_of_a_gpu_is_never_slower(monkeypatch, better):
    before = predicted().steps
    monkeypatch.setitem(GPUS, "H200", replace(GPUS["H200"], **better))
    for one, other in zip(before, predicted().steps, strict=True):
        assert all(
            faster <= slower for faster, slower in zip(astuple(other.seconds), astuple(one.seconds), strict=True)
        )


def test_fewer_steps_give_more_tokens():
    few, many = predicted(batches=[1], steps=16), predicted(batches=[1])
    assert [step.steps for step in few.steps if step.cache_method == "none"] == [16]
    rates = few.speeds[0].tokens_per_second.launched, many.speeds[0].tokens_per_second.launched
    assert rates[0] == pytest.approx(4 * rates[1], rel=0.02)


def test_blocks_that_are_kept_are_recorded_and_prompts_are_not():
    update, reuse, *_ = predicted(SDAR, method="block", batches=[1]).steps
    assert (update.state, update.steps, reuse.steps, reuse.rows) == ("update", 16, 48, 4)
    assert update.seconds.recorded < update.seconds.launched
    of_prompt, *_ = predicted(SDAR, method="block", batches=[1], response=4).steps
    assert (of_prompt.steps, of_prompt.seconds.recorded) == (1, of_prompt.seconds.launched)


def test_rows_beyond_a_pass_take_more_passes():
    few, many = (predicted(batches=[16], max_num_batched_tokens=rows).steps[0] for rows in (16 * 576, 8 * 576))
    assert many.launches == pytest.approx(2 * few.launches, rel=0.02)


@pytest.mark.parametrize(
    ("model", "options", "settings", "problem"),
    [
        (LLADA, {"cache_method": "maskkv"}, {}, "'maskkv'; choose none, prefix, dual, sparse, dkv, freecache"),
        (LLADA, {"guide_model": "demo"}, {}, "a guide"),
        (LLADA, {}, {"tensor_parallel_size": 2}, "more than one GPU"),
        (LLADA, {}, {"dtype": "float32"}, "float32"),
        (LLADA, {}, {"steps": 65}, r"--steps 65 is out of range: 2 \(one per block\) … 64"),
        ("demo", {}, {"prompt": 8, "response": 8}, "heads of"),
    ],
)
def test_what_cannot_be_predicted_is_refused(model, options, settings, problem):
    settings = {"prompt": 512, "response": 64} | settings
    steps = settings.pop("steps", None)
    with pytest.raises(SizingError, match=problem):
        predict(Deployment(model, 0, options=EngineOptions(**options), **settings), "H200", [1], steps)


def test_tiles_are_those_of_which_the_page_has_the_compilers_report():
    rows = re.findall(
        r"^\|[^|]*\| [\d,]+ \| (\d+) \| (\d) \| ([\d, ]+) \| ([\d, ]+) \| ([\d, ]+) \|$",
        (CHECKOUT / "docs" / "gpu.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert {int(row[0]) for row in rows} == set(COMPILED_TILES)
    for pairs, warps, *of_gpus in rows:
        tile = COMPILED_TILES[int(pairs)]
        assert tile.warps == int(warps)
        triples = zip(*([int(number) for number in column.split(", ")] for column in of_gpus), strict=True)
        for name, (registers, shared_memory, programs) in zip(("H100", "A100", "RTX4090"), triples, strict=True):
            compiled_for = GPUS[name].compiled_for
            assert tile.shared_memory[compiled_for] == shared_memory
            assert programs_at_once(GPUS[name], int(pairs)) == programs
            assert tile.registers[compiled_for] >= registers or tile.registers == COMPILED_TILES[128].registers


def test_the_time_beside_the_model_is_what_was_measured():
    file = CHECKOUT / "benchmarks" / "results" / "engine_overhead_cpu.json"
    alone, many = (
        row["overhead_ms"] - row["token_statistics_ms"]
        for row in json.loads(file.read_text(encoding="utf-8"))["figures"]
        if row["kind"] == "reuse" and row["steps_per_dispatch"] == 1
    )
    of_request = (many - alone) / 31
    assert of_request == pytest.approx(prediction.DISPATCH_OF_REQUEST * 1000, abs=5e-4)
    assert alone - of_request == pytest.approx(prediction.DISPATCH * 1000, abs=5e-4)
