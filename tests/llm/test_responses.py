"""Where a response ends, and what a request that leaves things open gets."""

import pytest
from vllm import SamplingParams

from dllm_engine import DiffusionParams
from tests.support import tiny_checkpoints
from tests.support.engines import generate

PROMPT = [3, 1, 4, 1, 5, 9]
SETTINGS = {"gen_length": 32, "block_length": 8}


def complete(llm, **settings):
    return generate(llm, [PROMPT], DiffusionParams(**(SETTINGS | settings)))[0].outputs[0]


@pytest.fixture(scope="module")
def full(engines, tiny_llada) -> list[int]:
    """The response nothing ends."""
    return list(complete(engines(tiny_llada), ignore_eos=True).token_ids)


@pytest.fixture(scope="module")
def cut(full) -> int:
    """Where a token appears for the first time, inside the second block."""
    return next(i for i in range(9, 15) if full[i] not in full[:i])


@pytest.fixture(scope="module")
def ending(engines, tmp_path_factory, full, cut):
    """The same model, but the token at ``cut`` is its end token."""
    return engines(tiny_checkpoints.write_llada(tmp_path_factory.mktemp("ending"), eos_token_id=full[cut]))


def test_response_ends_at_the_end_token_of_a_finished_block(ending, full, cut):
    completion = complete(ending)
    assert list(completion.token_ids) == full[: cut + 1]
    assert completion.finish_reason == "stop"
    assert completion.diffusion.forward_passes == 16, "the blocks behind it are not computed"


def test_ignore_eos_returns_the_full_length(ending, full):
    completion = complete(ending, ignore_eos=True)
    assert list(completion.token_ids) == full
    assert completion.finish_reason == "length"
    assert completion.diffusion.forward_passes == 32


@pytest.mark.parametrize("key", ["eos_token_id", "end_of_turn_token_id"])
def test_one_of_several_end_tokens_and_that_of_a_turn_end_too(engines, tmp_path, full, cut, key):
    ends = [149, full[cut]] if key == "eos_token_id" else full[cut]
    folder = tiny_checkpoints.write_llada(tmp_path, **{key: ends})
    assert list(complete(engines(folder)).token_ids) == full[: cut + 1]


def test_stop_token_ends_and_is_named(engines, tiny_llada, full, cut):
    completion = complete(engines(tiny_llada), stop_token_ids=[full[cut]], ignore_eos=True)
    assert list(completion.token_ids) == full[: cut + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", full[cut])


def test_samples_of_one_request_differ(engines, tiny_llada):
    params = DiffusionParams(**SETTINGS, n=3, temperature=1.0, seed=4, ignore_eos=True)
    first, again = (generate(engines(tiny_llada), [PROMPT], params)[0].outputs for _ in range(2))
    assert len({tuple(sample.token_ids) for sample in first}) == 3
    assert [sample.token_ids for sample in again] == [sample.token_ids for sample in first]


# Lengths nobody asked for


@pytest.fixture(scope="module")
def roomy(engines, tmp_path_factory):
    folder = tiny_checkpoints.write_llada(tmp_path_factory.mktemp("roomy"), max_sequence_length=512)
    return engines(folder, max_model_len=512)


@pytest.mark.parametrize("ask", ["DiffusionParams", "max_tokens=None", "no parameters"])
def test_open_length_is_256(roomy, ask):
    params = {
        "DiffusionParams": DiffusionParams(ignore_eos=True, steps=8),
        "max_tokens=None": SamplingParams(max_tokens=None, temperature=0, ignore_eos=True, extra_args={"steps": 8}),
        "no parameters": None,
    }[ask]
    (output,) = generate(roomy, [PROMPT], params)
    completion = output.outputs[0]
    if ask == "no parameters":  # ends where the model does
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 256
        assert completion.diffusion.tokens_computed == completion.diffusion.forward_passes * (len(PROMPT) + 256)
    else:
        assert len(completion.token_ids) == 256


def test_open_length_is_what_fits_where_256_does_not(engines, tiny_llada):
    params = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True, extra_args={"steps": 4})
    llm = engines(tiny_llada, max_model_len=128)
    (output,) = generate(llm, [[7] * 28], params)
    assert len(output.outputs[0].token_ids) == 100
    (output,) = generate(llm, [[7] * 28], None)
    figures = output.outputs[0].diffusion
    assert figures.tokens_computed == 128 * figures.forward_passes


def test_plain_sampling_params_decode_like_diffusion_params(engines, tiny_llada, tiny_dream):
    for folder in (tiny_llada, tiny_dream):
        llm = engines(folder)
        plain = SamplingParams(
            max_tokens=24, temperature=0, ignore_eos=True, extra_args={"block_length": 8, "steps": 12}
        )
        own = DiffusionParams(gen_length=24, block_length=8, steps=12, ignore_eos=True)
        (one,), (other,) = generate(llm, [PROMPT], plain), generate(llm, [PROMPT], own)
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].diffusion == other.outputs[0].diffusion


def test_parameters_survive_a_clone_and_the_wire():
    import msgspec

    params = DiffusionParams(gen_length=12, block_length=4, steps=6, unmasking="random", top_p=0.5, top_k=3, seed=1)
    wanted = {"block_length": 4, "steps": 6, "unmasking": "random", "top_p": 0.5, "top_k": 3}
    assert params.extra_args == wanted
    assert params.clone().extra_args == wanted
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params.to_sampling_params()), type=SamplingParams)
    assert sent.extra_args == wanted
    assert (sent.max_tokens, sent.temperature, sent.seed) == (12, 0.0, 1)


def test_stock_vllm_class_serves_the_model_through_the_plugin(engines, tiny_llada, full):
    import vllm

    llm = vllm.LLM(
        str(tiny_llada), dtype="float32", skip_tokenizer_init=True, max_model_len=128, enforce_eager=True,
        kv_cache_memory_bytes=64 << 20, additional_config={"dllm": {"cache_method": "none", "trace": True}},
    )  # fmt: skip
    engines.keep(llm)
    (output,) = generate(llm, [PROMPT], DiffusionParams(**SETTINGS, ignore_eos=True))
    assert list(output.outputs[0].token_ids) == full
    assert len(output.outputs[0].diffusion.unmasked_per_step) == 32


# Text


@pytest.fixture(scope="module")
def speaking(engines):
    """The demo model, with its tokenizer."""
    return engines("demo", skip_tokenizer_init=False, max_model_len=512)


def ask(llm, **settings):
    params = DiffusionParams(**({"gen_length": 32, "block_length": 8, "ignore_eos": True} | settings))
    return llm.generate(["User: codes: Tom=48; Ida=07. Give Ida\nBot:"], params, use_tqdm=False)[0].outputs[0]


def test_stop_string_ends_before_it(speaking):
    whole = ask(speaking).text
    stop = whole[2:4]
    completion = ask(speaking, stop=[stop])
    assert completion.text == whole[: whole.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    kept = ask(speaking, stop=[stop], include_stop_str_in_output=True)
    assert kept.text == whole[: whole.index(stop) + len(stop)]


def test_empty_text_is_refused(speaking):
    with pytest.raises(ValueError, match="empty"):
        speaking.generate([""], DiffusionParams(gen_length=8), use_tqdm=False)
