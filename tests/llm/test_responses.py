"""Where a response ends, and what a request that leaves things open gets."""

import pytest

from tests.support import tiny_checkpoints
from tests.support.engines import generate

PROMPT = [3, 1, 4, 1, 5, 9]
SETTINGS = {"gen_length": 32, "block_length": 8}


def complete(llm, **settings):
    from dllm_engine import DiffusionParams

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


def test_one_of_several_end_tokens_of_the_config_ends(engines, tmp_path, full, cut):
    folder = tiny_checkpoints.write_llada(tmp_path, eos_token_id=[149, full[cut]])
    assert list(complete(engines(folder)).token_ids) == full[: cut + 1]


def test_end_of_turn_token_ends_too(engines, tmp_path, full, cut):
    folder = tiny_checkpoints.write_llada(tmp_path, end_of_turn_token_id=full[cut])
    assert list(complete(engines(folder)).token_ids) == full[: cut + 1]


def test_stop_token_ends_and_is_named(engines, tiny_llada, full, cut):
    completion = complete(engines(tiny_llada), stop_token_ids=[full[cut]], ignore_eos=True)
    assert list(completion.token_ids) == full[: cut + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", full[cut])


def test_first_of_two_stop_tokens_counts(engines, tiny_llada, full, cut):
    completion = complete(engines(tiny_llada), stop_token_ids=[full[cut + 3], full[cut]], ignore_eos=True)
    assert list(completion.token_ids) == full[: full.index(completion.stop_reason) + 1]
    assert completion.stop_reason in (full[cut], full[cut + 3])
    assert not {full[cut], full[cut + 3]} & set(completion.token_ids[:-1])


# Lengths nobody asked for


@pytest.fixture(scope="module")
def roomy(engines, tmp_path_factory):
    folder = tiny_checkpoints.write_llada(tmp_path_factory.mktemp("roomy"), max_sequence_length=512)
    return engines(folder, max_model_len=512)


@pytest.mark.parametrize("ask", ["DiffusionParams", "max_tokens=None", "no parameters"])
def test_open_length_is_256(roomy, ask):
    from vllm import SamplingParams

    from dllm_engine import DiffusionParams

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
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True, extra_args={"steps": 4})
    llm = engines(tiny_llada, max_model_len=128)
    (output,) = generate(llm, [[7] * 28], params)
    assert len(output.outputs[0].token_ids) == 100
    (output,) = generate(llm, [[7] * 28], None)
    figures = output.outputs[0].diffusion
    assert figures.tokens_computed == 128 * figures.forward_passes


def test_plain_sampling_params_decode_like_diffusion_params(engines, tiny_llada, tiny_dream):
    from vllm import SamplingParams

    from dllm_engine import DiffusionParams

    for folder in (tiny_llada, tiny_dream):
        llm = engines(folder)
        plain = SamplingParams(
            max_tokens=24, temperature=0, ignore_eos=True, extra_args={"block_length": 8, "steps": 12}
        )
        own = DiffusionParams(gen_length=24, block_length=8, steps=12, ignore_eos=True)
        (one,), (other,) = generate(llm, [PROMPT], plain), generate(llm, [PROMPT], own)
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].diffusion == other.outputs[0].diffusion


def test_gen_length_and_max_tokens_are_the_same_field():
    from dllm_engine import DiffusionParams

    assert DiffusionParams(gen_length=12).max_tokens == 12
    assert DiffusionParams(max_tokens=12).gen_length == 12
    assert DiffusionParams(gen_length=12, max_tokens=12).gen_length == 12
    assert DiffusionParams().gen_length is None  # open until the prompt is known


def test_parameters_survive_a_clone_and_the_wire():
    import msgspec
    from vllm import SamplingParams

    from dllm_engine import DiffusionParams

    params = DiffusionParams(gen_length=12, block_length=4, steps=6, unmasking="random", top_p=0.5, top_k=3, seed=1)
    wanted = {"block_length": 4, "steps": 6, "unmasking": "random", "top_p": 0.5, "top_k": 3}
    assert params.extra_args == wanted
    assert params.clone().extra_args == wanted
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params.to_sampling_params()), type=SamplingParams)
    assert sent.extra_args == wanted
    assert (sent.max_tokens, sent.temperature, sent.seed) == (12, 0.0, 1)


def test_stock_vllm_class_serves_the_model_through_the_plugin(engines, tiny_llada, full):
    import vllm

    from dllm_engine import DiffusionParams

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
    from dllm_engine import DiffusionParams

    params = DiffusionParams(**({"gen_length": 32, "block_length": 8, "ignore_eos": True} | settings))
    return llm.generate(["User: codes: Tom=48; Ida=07. Give Ida\nBot:"], params, use_tqdm=False)[0].outputs[0]


def test_text_is_that_of_the_tokens(speaking):
    completion = ask(speaking)
    tokenizer = speaking.get_tokenizer()
    assert len(completion.token_ids) == 32
    assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert completion.text


def test_stop_string_ends_before_it(speaking):
    whole = ask(speaking).text
    stop = whole[2:4]
    completion = ask(speaking, stop=[stop])
    assert completion.text == whole[: whole.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    kept = ask(speaking, stop=[stop], include_stop_str_in_output=True)
    assert kept.text == whole[: whole.index(stop) + len(stop)]


def test_text_prompt_with_the_mask_token_is_refused(speaking):
    from dllm_engine import DiffusionParams

    mask = speaking.get_tokenizer().mask_token
    with pytest.raises(ValueError, match="mask token"):
        speaking.generate([f"User: {mask}\nBot:"], DiffusionParams(gen_length=8), use_tqdm=False)
    assert ask(speaking).text


def test_empty_text_is_refused(speaking):
    from dllm_engine import DiffusionParams

    with pytest.raises(ValueError, match="empty"):
        speaking.generate([""], DiffusionParams(gen_length=8), use_tqdm=False)


def test_chat_uses_the_models_template(speaking):
    from dllm_engine import DiffusionParams

    params = DiffusionParams(gen_length=16, block_length=8)
    (chat,) = speaking.chat([{"role": "user", "content": "hello"}], params, use_tqdm=False)
    (plain,) = speaking.generate(["User: hello\nBot:"], params, use_tqdm=False)
    assert chat.outputs[0].token_ids == plain.outputs[0].token_ids
    assert chat.prompt_token_ids == plain.prompt_token_ids


def test_default_of_the_demo_model_ends_by_itself(speaking):
    completion = speaking.generate(["User: hello\nBot:"], use_tqdm=False)[0].outputs[0]
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) < 256
