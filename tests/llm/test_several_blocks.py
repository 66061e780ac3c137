"""Requests that run several blocks at once: what callers see of them, beside ``tests/methods`` and the reference."""

import pytest

from dllm_engine import DiffusionParams
from tests.llm.test_step_streaming import stream
from tests.support.engines import assert_nothing_left, generate

PROMPT = [(37 * i * i + 11 * i + 5) % 480 for i in range(12)]
SETTINGS = {"gen_length": 32, "block_length": 8, "ignore_eos": True, "threshold": 0.2, "block_add_threshold": 0.2}


def parameters(**settings):
    return DiffusionParams(**(SETTINGS | settings))


def answer(llm, **settings):
    return generate(llm, [PROMPT], parameters(**settings))[0].outputs[0]


@pytest.fixture(params=["llada-tiny-a", "dream-tiny-a"])
def checkpoint(request, reference_checkpoints):
    return reference_checkpoints / request.param


@pytest.fixture
def llada(reference_checkpoints):
    return reference_checkpoints / "llada-tiny-a"


@pytest.mark.parametrize("rule", [{"threshold": 0.2}, {"factor": 3.0}, {"margin": 0.1}, {"entropy_threshold": 1.5}])
def test_several_blocks_run_and_are_sent_in_order(engines, checkpoint, rule):
    llm = engines(checkpoint, cache_method="dual")
    settings = {"threshold": None} | rule
    whole = answer(llm, **settings)
    starts = [start for start, _ in whole.diffusion.windows]
    assert max(stop - start for start, stop in whole.diffusion.windows) > 8
    assert starts == sorted(starts)
    outputs = [
        output.outputs[0] for output in stream(llm, prompts=[PROMPT], stream_granularity="block", **SETTINGS | settings)
    ]
    assert [token for completion in outputs for token in completion.token_ids] == list(whole.token_ids)
    assert all(len(completion.token_ids) % 8 == 0 for completion in outputs)
    assert_nothing_left(llm)


def test_every_step_shows_all_running_blocks(engines, checkpoint):
    llm = engines(checkpoint, cache_method="dual")
    whole = answer(llm)
    outputs = [output.outputs[0] for output in stream(llm, prompts=[PROMPT], **SETTINGS)]
    shown = [completion.provisional for completion in outputs]
    first = len(PROMPT)
    assert [(block.start, block.start + len(block.token_ids)) for block in shown] == [
        (start - first, stop - first) for start, stop in whole.diffusion.windows
    ]
    sent = 0
    for completion, block in zip(outputs, shown, strict=True):
        sent += len(completion.token_ids)
        assert block.sent == sent
        known = [token for token, masked in zip(block.token_ids, block.masked, strict=True) if not masked]
        final = whole.token_ids[block.start : block.start + len(block.token_ids)]
        assert known == [token for token, masked in zip(final, block.masked, strict=True) if not masked]
    assert not any(shown[-1].masked)


def first_end(whole, number: int) -> tuple[int, int]:
    """A token of the response and its first place there, the ``number``-th that could end it."""
    return sorted((whole.token_ids.index(token), token) for token in set(whole.token_ids))[number]


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("settings", [{}, {"block_add_threshold": None}, {"block_length": 32}])
def test_an_end_token_ends_the_response_once_no_mask_is_before_it(engines, llada, settings, number):
    llm = engines(llada)
    whole = answer(llm, **settings)
    place, end = first_end(whole, number)
    ended = answer(llm, **settings, stop_token_ids=[end])
    assert list(ended.token_ids) == list(whole.token_ids[: place + 1])
    assert (ended.finish_reason, ended.stop_reason) == ("stop", end)
    order = whole.diffusion.unmasked_per_step
    decided = [position - len(PROMPT) for position in range(len(PROMPT), len(PROMPT) + place + 1)]
    filled_at = {position - len(PROMPT): n for n, step in enumerate(order, 1) for position in step}
    assert ended.diffusion.forward_passes == max(filled_at[position] for position in decided)


CHAT = [{"role": "user", "content": "Tom=48. Ida=07. Max=31. Give: Ida, Tom"}]


def test_stop_strings_and_choices(engines):
    llm = engines("demo", skip_tokenizer_init=False, cache_method="dual", page_size=8)
    asked = {"gen_length": 32, "block_length": 8, "threshold": 0.9, "block_add_threshold": 0.0}

    def completions(**settings):
        return llm.chat(CHAT, DiffusionParams(**asked, **settings), use_tqdm=False)[0].outputs

    (whole,), (stopped,) = completions(), completions(stop=["Tom"])
    assert whole.text.strip() == "Ida=07, Tom=48"
    assert (stopped.text.strip(), stopped.finish_reason, stopped.stop_reason) == ("Ida=07,", "stop", "Tom")
    assert [c.text for c in completions(n=2, temperature=0.1, seed=3)] == [whole.text] * 2
    assert_nothing_left(llm)
