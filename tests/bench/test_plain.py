"""The baseline decodes what the engine decodes."""

import pytest
import torch

from dllm_engine import DiffusionParams
from dllm_engine.bench.plain import PlainDecoder, check_baseline, decode
from dllm_engine.checkpoints import load_config
from dllm_engine.families import family_of
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.options.resolve import end_token_ids, resolve_decoding
from tests.support.engines import generate

SETTINGS = [
    {"gen_length": 12, "block_length": 4},
    {"gen_length": 10, "block_length": 4, "steps": 5},
    {"gen_length": 12, "block_length": 12, "threshold": 0.2},
]


@pytest.fixture(params=["llada", "llada_moe", "dream", "sdar", "sdar_moe", "llada2"])
def checkpoint(request):
    return request.getfixturevalue(f"tiny_{request.param}")


def baseline(checkpoint, prompt, params, **how):
    config = load_config(str(checkpoint))
    model = PlainDecoder.from_checkpoint(checkpoint, config, torch.float32)
    spec = resolve_decoding(params, len(prompt), family_of(config), EngineOptions())
    return list(decode(model, prompt, spec, end_token_ids(params, config), **how))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items()))
def test_tokens_passes_and_rows_are_the_engines(engines, checkpoint, settings):
    params = DiffusionParams(**settings, ignore_eos=True)
    for prompt in ([3, 17, 99, 4, 61], [8] * 21):
        (output,) = generate(engines(checkpoint, cache_method="none"), [prompt], params)
        *_, response = baseline(checkpoint, prompt, params)
        figures = output.outputs[0].diffusion
        assert response.token_ids == list(output.outputs[0].token_ids)
        assert response.forward_passes == figures.forward_passes
        assert response.tokens_computed == figures.tokens_computed
        assert response.tokens_unmasked == figures.tokens_unmasked


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items()))
def test_keeping_blocks_changes_no_token_and_stores_each_in_a_pass_of_its_own(engines, tiny_sdar, settings):
    params = DiffusionParams(**settings, ignore_eos=True)
    for prompt in ([3, 17, 99, 4, 61], [8] * 21):
        (output,) = generate(engines(tiny_sdar), [prompt], params)
        *_, whole = baseline(tiny_sdar, prompt, params)
        blocks = baseline(tiny_sdar, prompt, params, keeps_blocks=True)
        assert blocks[-1].token_ids == whole.token_ids == list(output.outputs[0].token_ids)
        has_prompt_pass = len(prompt) >= settings["block_length"]
        assert blocks[-1].forward_passes == whole.forward_passes + len(blocks) + has_prompt_pass
        length, first = settings["block_length"], len(prompt) % settings["block_length"]
        assert blocks[-1].tokens_computed == len(prompt) - first + length * (whole.forward_passes + len(blocks))


def test_a_response_ends_with_the_block_of_its_first_end_token(engines, tiny_llada):
    prompt = [3, 17, 99, 4, 61]
    whole = DiffusionParams(gen_length=12, block_length=4, ignore_eos=True)
    (output,) = generate(engines(tiny_llada), [prompt], whole)
    params = DiffusionParams(gen_length=12, block_length=4, stop_token_ids=[output.outputs[0].token_ids[5]])
    (output,) = generate(engines(tiny_llada), [prompt], params)
    blocks = baseline(tiny_llada, prompt, params)
    assert blocks[-1].token_ids == list(output.outputs[0].token_ids)
    assert len(blocks) < 3


def test_random_weights_have_the_shape_of_a_checkpoint(checkpoint):
    config = load_config(str(checkpoint))
    made = PlainDecoder.random(config, torch.float32)
    loaded = PlainDecoder.from_checkpoint(checkpoint, config, torch.float32)
    assert {part: w.shape for part, w in made.weights.items()} == {part: w.shape for part, w in loaded.weights.items()}
    assert made.num_bytes == loaded.num_bytes == 4 * sum(w.numel() for w in made.weights.values())


@pytest.mark.parametrize("options", [{"unmasking": "random"}, {"temperature": 1.0}, {"delay_eos": True}])
def test_what_the_baseline_cannot_decode_is_refused(tiny_llada, options):
    config = load_config(str(tiny_llada))
    params = DiffusionParams(gen_length=8, block_length=4, **options)
    spec = resolve_decoding(params, 5, family_of(config), EngineOptions())
    with pytest.raises(ValueError, match="baseline"):
        check_baseline(spec)
