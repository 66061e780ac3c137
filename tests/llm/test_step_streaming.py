"""``stream_granularity="step"``: the running block after every denoising step, and the
same response as without.
"""

import math
from dataclasses import replace
from typing import Any

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.provisional import BlockChanges, BlockReader
from tests.support.engines import completion_of
from tests.support.stepped_engines import streamed

PROMPT = [3, 1, 4, 1, 5, 9]
SETTINGS: dict[str, Any] = {"gen_length": 24, "block_length": 8, "ignore_eos": True}


def plain(llm, prompt=PROMPT, **settings) -> Any:
    return completion_of(llm, prompt, **(SETTINGS | settings))


SPANS = {
    "span_steps": 1,
    "span_window": 1,
    "slow_threshold": 0.6,
    "fast_threshold": 0.2,
}
"""SlowFast sampling that fills several tokens in some passes."""
RULES: dict[str, dict[str, Any]] = {
    "one": {},
    "slow_fast": {"slow_fast": SPANS},
    "several blocks": {"threshold": 0.2, "block_add_threshold": 0.2},
}


def stream(llm, *, prompts=(PROMPT,), **settings) -> list:
    params = DiffusionParams(stream_granularity="step", **SETTINGS | settings)
    return streamed(llm, prompts, [params] * len(prompts))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model", ["llada-tiny-a", "dream-tiny-a"])
@pytest.mark.parametrize("cache_method", ["dual", "sparse"])
def test_every_step_shows_the_running_blocks(
    engines, reference_checkpoints, model, cache_method, rule
):
    llm = engines(reference_checkpoints / model, cache_method=cache_method)
    mask = llm.model_config.hf_config.mask_token_id
    prompt = [(37 * i * i + 11 * i + 5) % 480 for i in range(12)]
    asked = RULES[rule] | {"logprobs": 0}
    whole = plain(llm, prompt=prompt, **asked)
    completions = [
        output.outputs[0] for output in stream(llm, prompts=[prompt], **asked)
    ]
    shown = [completion.provisional for completion in completions]
    num_passes = whole.diffusion.forward_passes
    assert (num_passes == 24) == (rule == "one")
    passes = [*range(1, num_passes + 1)]
    assert [block.forward_pass for block in shown] == passes
    assert rule != "one" or [(block.block, block.step) for block in shown] == [
        (n // 8, n % 8 + 1) for n in range(24)
    ]
    windows = [
        (len(prompt) + block.start, len(prompt) + block.start + len(block.token_ids))
        for block in shown
    ]
    assert windows == whole.diffusion.windows
    sizes = {stop - start for start, stop in windows}
    assert (max(sizes) > 8) == (rule == "several blocks")
    filled = {
        position - len(prompt): number
        for number, step in enumerate(whole.diffusion.unmasked_per_step)
        for position in step
    }
    sent: list[int] = []
    for number, (completion, block) in enumerate(zip(completions, shown, strict=True)):
        for i, token in enumerate(block.token_ids, start=block.start):
            own = i - block.start
            assert block.masked[own] == (filled[i] > number)
            assert token == (mask if block.masked[own] else whole.token_ids[i])
            confidence = block.confidences[own]
            if not block.masked[own]:  # that of the step that committed it
                logprob = whole.logprobs[i][token].logprob
                assert confidence == pytest.approx(math.exp(logprob), rel=1e-4)
            else:
                assert confidence is None or 0 < confidence <= 1
        assert len(completion.token_ids) % 8 == 0
        sent += completion.token_ids
        assert (block.sent, block.num_blocks) == (len(sent), 3)
    # The response and its figures are those without streaming by step.
    assert sent == list(whole.token_ids)
    assert [entry for c in completions for entry in c.logprobs] == whole.logprobs
    assert completions[-1].finish_reason == "length"
    assert completions[-1].diffusion == whole.diffusion
    assert [c.diffusion.forward_passes for c in completions] == passes
    assert rule != "one" or not completions[0].diffusion.trace, (
        "it would grow with every chunk"
    )


@pytest.mark.parametrize(
    ("cache_method", "rows"), [("none", 64), ("block", 64), ("block", 16)]
)
def test_blocks_that_begin_in_the_prompt_are_shown_from_the_response_on(
    engines, tiny_sdar, cache_method, rows
):
    """And not as far as they lie behind it; nor a pass that feeds a part
    of the prompt.
    """
    prompt = list(range(30))
    llm = engines(
        tiny_sdar,
        cache_method=cache_method,
        max_num_batched_tokens=rows,
        max_num_seqs=8,
    )
    outputs = [
        output.outputs[0]
        for output in stream(llm, prompts=[prompt], gen_length=9, block_length=4)
    ]
    blocks = [completion.provisional for completion in outputs]
    spans = {(b.block, b.start, len(b.token_ids)) for b in blocks}
    assert spans == {(0, 0, 2), (1, 2, 4), (2, 6, 3)}
    assert {
        (b.num_blocks, b.gen_length, b.block_length, b.first_block_length)
        for b in blocks
    } == {(3, 9, 4, 2)}
    assert [b.step for b in blocks if b.block < 2] == [1, 2, 1, 2, 3, 4]
    assert [len(c.token_ids) for c in outputs if c.token_ids] == [2, 4, 3]
    expected = plain(llm, prompt=prompt, gen_length=9, block_length=4)
    assert [token for c in outputs for token in c.token_ids] == list(expected.token_ids)
    assert blocks[-1].token_ids == list(expected.token_ids)[6:]


def test_latency_is_that_of_blocks(engines, tiny_llada):
    """vLLM counts an output as new tokens; a provisional block is none."""
    llm = engines(tiny_llada, trace=False, disable_log_stats=False)

    def count(name):
        return sum(m.count for m in llm.get_metrics() if m.name == f"vllm:{name}")

    before = {
        name: count(name)
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")
    }
    stream(llm)
    assert (
        count("time_to_first_token_seconds") - before["time_to_first_token_seconds"]
        == 1
    )
    assert (
        count("inter_token_latency_seconds") - before["inter_token_latency_seconds"]
        == 2
    )


class Tokenizer:
    """Tokens 1 and 2 are a letter of two bytes; 9 ends the text."""

    all_special_ids = (9,)

    def decode(self, tokens):
        data = b"".join(
            {1: b"\xc3", 2: b"\xa9", 5: b"a", 9: b"<end>"}[token] for token in tokens
        )
        return data.decode(errors="replace")


def message(*tokens, block=0, step=1, guess=None) -> dict:
    """The running block after a step, as the engine sends it; None for a mask."""
    length = len(tokens)
    masked = [token is None for token in tokens]
    return {
        "block": block,
        "num_blocks": 2,
        "gen_length": 2 * length,
        "block_length": length,
        "first_block_length": length,
        "start": block * length,
        "sent": block * length,
        "step": step,
        "forward_pass": step,
        "token_ids": [token or 0 for token in tokens],
        "masked": masked,
        "confidences": [guess if each else 0.12345678 for each in masked],
    }


def test_a_chunk_brings_what_changed_since_the_last_one():
    reader, changes = BlockReader(Tokenizer()), BlockChanges()
    first = changes.to(reader.read(message(None, 9, None, guess=0.4)))
    assert first == {
        "block": 0,
        "step": 1,
        "forward_pass": 1,
        "sent": 0,
        "num_blocks": 2,
        "gen_length": 6,
        "block_length": 3,
        "first_block_length": 3,
        "start": 0,
        "length": 3,
        "positions": [1],
        "token_ids": [9],
        "confidences": [0.1235],
        "pieces": ["<end>"],
        "special": [1],
        "guess_positions": [0, 2],
        "guess_percents": [40, 40],
    }
    assert changes.to(reader.read(message(5, 9, None, step=2, guess=0.4099))) == {
        "block": 0,
        "step": 2,
        "forward_pass": 2,
        "sent": 0,
        "positions": [0],
        "token_ids": [5],
        "confidences": [0.1235],
        "pieces": ["a"],
        "special": [],
        "guess_positions": [],
        "guess_percents": [],
    }
    assert reader.read(message(5, 9, 5, step=3)).text == "aa"
    third = changes.to(reader.read(message(None, 5, None, block=1)))
    assert (third["start"], third["positions"], third["guess_positions"]) == (
        3,
        [4],
        [],
    )


def test_a_piece_that_a_later_token_changes_is_sent_again():
    reader, changes = BlockReader(Tokenizer()), BlockChanges()
    assert changes.to(reader.read(message(None, 2)))["pieces"] == [""]
    letter = changes.to(reader.read(message(1, 2, step=2)))
    assert (letter["positions"], letter["pieces"]) == ([0, 1], ["", "é"])


@pytest.mark.parametrize("sent", [range(24), (0, 3, 4, 12, 23), (5, 7, 15, 23)])
def test_a_client_that_misses_steps_sees_the_later_state(engines, tiny_llada, sent):
    """It rebuilds the response from the chunks, as docs/streaming.md
    tells clients to.
    """
    changes = BlockChanges()
    pieces = dict[int, str | None]()
    confidences = dict[int, float]()
    for n, output in enumerate(stream(engines(tiny_llada))):
        if n not in sent:
            continue
        block = output.outputs[0].provisional
        tokens = zip(block.masked, block.token_ids, strict=True)
        block = replace(
            block,
            pieces=[None if m else f"<{t}>" for m, t in tokens],
            special=[False] * 8,
        )
        form = changes.to(block)
        pieces |= zip(form["positions"], form["pieces"], strict=True)
        guesses = [percent / 100 for percent in form["guess_percents"]]
        confidences |= zip(form["guess_positions"], guesses, strict=True)
        confidences |= zip(form["positions"], form["confidences"], strict=True)
        here = range(block.start, block.start + 8)
        assert [pieces.get(p) for p in here] == block.pieces
        assert [confidences.get(p) for p in here] == pytest.approx(
            block.confidences, abs=0.01
        )
