"""Sizing arithmetic says what a running engine does."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from dllm_engine import DiffusionParams
from dllm_engine.cache_methods import methods_for
from dllm_engine.checkpoints import RELEASED_CONFIGS, load_config
from dllm_engine.demo import DEMO_GUIDE_DIR
from dllm_engine.kernels.sampling import filtered_logits, gumbel_max
from dllm_engine.memory import Deployment, pages_of_pool, plan
from dllm_engine.model_bytes import activation_bytes, weight_bytes
from dllm_engine.model_executor.loading import hub
from dllm_engine.model_executor.models.quantization import QUANTIZATIONS
from dllm_engine.model_executor.token_prediction import TokenPredictor
from dllm_engine.options import EngineOptions
from tests.support import tiny_checkpoints
from tests.support.byte_level_tokenizers import copy_renumbered
from tests.support.engines import (
    EACH_METHOD_WITH_A_MODEL,
    assert_nothing_left,
    runner_of,
    scheduler_of,
)
from tests.support.plans import FULL_METHODS

PROMPT, RESPONSE, BLOCK_LENGTH, PAGE_SIZE = 75, 90, 40, 8
GIB = 1 << 30
MEMORY = 16 << 20
"""Bytes for pages, of all engines of the tests."""


def deployment(model, method="sparse", **settings):
    options = EngineOptions(cache_method=method, page_size=PAGE_SIZE)
    defaults: dict[str, Any] = {
        "prompt": PROMPT,
        "response": RESPONSE,
        "block_length": BLOCK_LENGTH,
        "options": options,
        "gpu_memory": GIB,
        "dtype": "float32",
        "max_num_batched_tokens": 512,
        "overhead": 0,
    }
    return Deployment(model=str(model), **defaults | settings)


def run_one(llm, response):
    """(pages reserved, most tokens retained, rows of all steps) of one request, as the
    scheduler has them.
    """
    params = DiffusionParams(
        gen_length=response, block_length=BLOCK_LENGTH, ignore_eos=True
    )
    llm.llm_engine.add_request("one", {"prompt_token_ids": [5] * PROMPT}, params)
    scheduler = scheduler_of(llm)
    reserved = retained = rows = 0
    while scheduler.states:
        (state,) = scheduler.states.values()
        step_plan = scheduler.method.plan(state.spec, state.progress)
        retained = max(retained, step_plan.retained)
        rows = rows + step_plan.max_rows
        llm.llm_engine.step()
        reserved = max(reserved, scheduler.pages.num_reserved)
    assert_nothing_left(llm)
    return reserved, retained, rows


@pytest.mark.parametrize(("method", "model"), EACH_METHOD_WITH_A_MODEL)
def test_a_request_takes_what_a_running_engine_reserves(
    engines, checkpoint_of, method, model
):
    model = checkpoint_of(model)
    llm = engines(model, cache_method=method, page_size=PAGE_SIZE)
    reserved, retained, _ = run_one(llm, RESPONSE)
    demand = plan(deployment(model, method)).demand
    assert demand.pages == reserved
    assert demand.tokens_retained == retained
    if method != "none":
        page_bytes = runner_of(llm).rank.pages.memory[0].nbytes
        assert demand.bytes == reserved * page_bytes
        assert pages_of_pool(MEMORY, page_bytes) == scheduler_of(llm).pages.num_pages
    # Rows of a step are the mean of what a scheduler plans, where each step of whole
    # blocks unmasks one token.
    response = 2 * BLOCK_LENGTH
    mean = plan(deployment(model, method, response=response)).demand.rows_per_step
    assert mean == run_one(llm, response)[2] / response


def padded_bytes(model, num_tables) -> int:
    """Of a checkpoint's weights, with its tables of the vocabulary padded."""
    in_file = sum(
        tensor.nbytes for tensor in load_file(model / "model.safetensors").values()
    )
    return in_file + num_tables * (192 - tiny_checkpoints.VOCAB_SIZE) * 64 * 4


@pytest.mark.parametrize(
    ("family", "config", "num_tables"),
    [
        ("llada", {}, 2),
        ("llada", {"include_qkv_bias": True, "weight_tying": True, "n_kv_heads": 2}, 1),
        ("llada_moe", {}, 2),
        ("llada_moe", tiny_checkpoints.ALL_KINDS_OF_EXPERTS, 2),
        ("dream", {}, 2),
        ("sdar_moe", {"mlp_only_layers": [0]}, 2),
    ],
)
def test_weights_are_the_checkpoints_with_a_padded_vocabulary(
    tmp_path, family, config, num_tables
):
    model = tiny_checkpoints.write(family, tmp_path, **config)
    assert weight_bytes(load_config(str(model)), 1, 4) == padded_bytes(
        model, num_tables
    )


def test_the_adapter_of_drafts_is_among_the_weights(reference_checkpoints):
    model = reference_checkpoints / "nemotron-labs-diffusion-spec-tiny-a"
    adapter = load_file(model / "linear_spec_lora" / "adapter_model.safetensors")

    def weights(name: str, **cache_options: Any) -> int:
        options = EngineOptions(cache_method="block", cache_options=cache_options)
        deployment = Deployment(model=name, prompt=64, response=32, options=options)
        return plan(deployment).weight_bytes

    drafts = weights(str(model), draft_lora="linear_spec_lora") - weights(str(model))
    assert drafts == 2 * sum(tensor.numel() for tensor in adapter.values())
    released = "nvidia/Nemotron-Labs-Diffusion-8B"
    drafts = weights(released, draft_lora="linear_spec_lora") - weights(released)
    assert drafts == 2 * 34 * 128 * (4096 + 4096)
    with pytest.raises(ValueError, match="JetLM/SDAR-8B-Chat has no such adapter"):
        weights("JetLM/SDAR-8B-Chat", draft_lora="linear_spec_lora")


def most_bytes(run) -> int:
    """That ``run`` holds at once."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize("method", ["none", "d2_cache"])
def test_the_activation_estimate_is_near_what_a_pass_holds(
    engines, tiny_llada, monkeypatch, method
):
    """Near: what the attention and the norm hold inside themselves is left out."""
    runner = runner_of(engines(tiny_llada, cache_method=method))
    rows = runner.vllm_config.scheduler_config.max_num_batched_tokens
    longest = runner.model_config.max_model_len
    # On a GPU these hold their results.
    monkeypatch.setattr(filtered_logits, "cpu", lambda logits, *_: logits.clone())
    monkeypatch.setattr(
        gumbel_max, "cpu", lambda logits, *_: logits.double()[:, :1].max(dim=-1)
    )
    predict = TokenPredictor.predict
    # In smaller chunks on a GPU, which hold no more.
    monkeypatch.setattr(
        TokenPredictor,
        "predict",
        lambda *args: args[-1].constrained or predict(*args),
    )
    runner.profile_run()
    estimate = activation_bytes(load_config(str(tiny_llada)), 1, 4, rows)
    assert (
        0.7
        < (estimate + FULL_METHODS[method].cost.num_bytes(rows, longest))
        / most_bytes(runner.profile_run)
        < 1.5
    )


@pytest.mark.parametrize("model", RELEASED_CONFIGS)
def test_every_released_model_can_be_planned(model):
    *_, method = methods_for(load_config(model).family.attention)
    assert (
        plan(
            deployment(model, method, dtype="auto", gpu_memory=80 * GIB)
        ).demand.requests
        > 0
    )


@pytest.mark.parametrize(
    ("model", "in_layers", "outside"),
    [
        ("GSAI-ML/LLaDA-8B-Instruct", 6.98, 1.04),
        ("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", 6.71, 0.65),
        ("Dream-org/Dream-v0-Instruct-7B", 6.53, 1.09),
        ("JetLM/SDAR-8B-Chat", 6.95, 1.24),
        ("JetLM/SDAR-30B-A3B-Chat", 29.9, 0.63),
        ("inclusionAI/LLaDA2.0-mini", 15.61, 0.65),
    ],
)
@pytest.mark.parametrize("scheme", [None, *QUANTIZATIONS])
def test_weights_of_released_models_have_their_bits(model, in_layers, outside, scheme):
    """Billions of weights in the linear layers, and of embeddings, head, norms and
    routers, which stay as they are.
    """
    four_bits = 4 + (16 + 4) / 128  # with a scale and a zero point per group
    bits = {None: 16, "fp8": 8, "int8": 8}.get(scheme, four_bits)
    *_, method = methods_for(load_config(model).family.attention)
    sizing = plan(
        deployment(
            model,
            method,
            dtype="auto",
            gpu_memory=80 * GIB,
            response=96,
            quantization=scheme,
        )
    )
    assert sizing.weight_bytes / 1e9 == pytest.approx(
        in_layers * bits / 8 + outside * 2, rel=0.01
    )


def test_requests_are_limited_by_pages_or_by_sequences(tiny_llada):
    sizing = plan(deployment(tiny_llada))
    assert (sizing.demand.requests, sizing.demand.limit) == (256, "max_num_seqs")
    # 512 rows hold about 1 MB; what remains of the GPU is a pool of some hundred pages.
    small = plan(deployment(tiny_llada, gpu_memory=6 << 20, max_num_seqs=10_000))
    assert small.demand.limit == "pages"
    assert small.demand.requests == small.num_pages // small.demand.pages
    none = plan(
        deployment(tiny_llada, "none", gpu_memory=6 << 20, max_num_seqs=10_000)
    ).demand
    assert (none.requests, none.pages, none.limit) == (10_000, 0, "max_num_seqs")


@pytest.mark.parametrize("own_tokenizer", [False, True])
def test_a_guides_pages_are_what_a_running_engine_reserves(
    engines, tmp_path, own_tokenizer
):
    guide = (
        str(copy_renumbered(DEMO_GUIDE_DIR, tmp_path / "guide"))
        if own_tokenizer
        else "demo"
    )
    settings: dict[str, Any] = {
        "cache_method": "dual",
        "page_size": PAGE_SIZE,
        "guide_model": guide,
    }
    llm = engines("demo", skip_tokenizer_init=False, **settings)
    reserved, retained, _ = run_one(llm, RESPONSE)
    sizing = plan(deployment("demo", options=EngineOptions(**settings)))
    assert (sizing.demand.pages, sizing.demand.tokens_retained, sizing.notes) == (
        reserved,
        retained,
        [],
    )
    shape = runner_of(llm).rank.guide.shape
    pages = runner_of(llm).rank.guide.pages
    assert shape.tokens_per_token == 1 + own_tokenizer
    tokens = (PROMPT + RESPONSE - 1) * (1 + own_tokenizer)
    per_page = pages.keys.shape[1] // shape.num_kv_heads
    (alone,) = (d for d in sizing.others if d.cache_method == "none")
    assert alone.pages == shape.num_layers * -(-tokens // per_page)
    (refusing,) = (d for d in sizing.others if d.cache_method == "d2_cache")
    assert refusing.requests == 0
    assert "guide" in refusing.limit


@pytest.mark.parametrize(("model_type", "num_tables"), [("llama", 2), ("qwen2", 1)])
def test_a_guides_weights_are_its_checkpoints(tmp_path, model_type, num_tables):
    tiny_checkpoints.write_guide(
        tmp_path, model_type, tie_word_embeddings=num_tables == 1
    )
    AutoTokenizer.from_pretrained(DEMO_GUIDE_DIR).save_pretrained(tmp_path)
    sizing = plan(deployment("demo", options=EngineOptions(guide_model=str(tmp_path))))
    alone = plan(deployment("demo", "none"))
    assert sizing.guide_weight_bytes == padded_bytes(tmp_path, num_tables)
    assert sizing.pool_bytes == alone.pool_bytes - sizing.guide_weight_bytes


def test_memory_adds_up(tiny_llada):
    sizing = plan(deployment(tiny_llada, gpu_memory_utilization=0.5, overhead=1 << 20))
    assert (
        sizing.weight_bytes
        + sizing.activation_bytes
        + sizing.overhead
        + sizing.pool_bytes
        == GIB // 2
    )


def test_tensor_parallel_ranks_share_weights_and_heads(tiny_dream):
    alone, half = (
        plan(deployment(tiny_dream, "dual", tensor_parallel_size=n)) for n in (1, 2)
    )
    assert half.page_bytes * 2 == alone.page_bytes
    assert half.demand.pages == alone.demand.pages
    assert alone.weight_bytes / 2 < half.weight_bytes < alone.weight_bytes * 0.6


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"prompt": 200}, "canvas of 290, the model has 256 positions"),
        ({"max_model_len": 100}, "--max-model-len 100 is out of range"),
        ({"max_model_len": 257}, "--max-model-len 257 is out of range"),
        (
            {"tensor_parallel_size": 3},
            "--tensor-parallel-size 3 does not divide the model's 4 attention heads",
        ),
        ({"block_length": 91}, "--block-length 91 is out of range: 1 … 90"),
        ({"gpu_memory": 1 << 20}, "leaves nothing for pages"),
        ({"gpu_memory": 1_700_000, "gpu_memory_utilization": 1.0}, "cannot hold one"),
        (
            {"options": EngineOptions(guide_model="demo")},
            "--guide-model needs the tokenizers of both models",
        ),
    ],
)
def test_what_does_not_fit_names_the_setting(tiny_llada, settings, problem):
    with pytest.raises(ValueError, match=problem):
        plan(deployment(tiny_llada, **settings))


def test_a_model_that_is_nowhere_is_named_at_once(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(hub, "hf_hub_download", lambda *_, **__: pytest.fail("asked"))
    for name in ("some/model", "no name: "):
        with pytest.raises(
            ValueError, match=r"config\.json of model .* cannot be read: .*connection"
        ):
            load_config(name)


def test_a_quantized_checkpoint_is_noted(tiny_llada, tmp_path):
    quantized = tiny_checkpoints.write(
        "llada", tmp_path, quantization_config={"quant_method": "fp8"}
    )
    assert "quantized" in plan(deployment(quantized)).notes[0]
    assert plan(deployment(tiny_llada)).notes == []


def test_float32_checkpoints_run_in_bfloat16_unless_asked(tiny_llada):
    assert plan(deployment(tiny_llada, dtype="auto")).dtype == "bfloat16"
    assert plan(deployment(tiny_llada, dtype="half")).dtype == "float16"
