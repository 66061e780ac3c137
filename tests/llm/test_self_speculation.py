"""Self-speculation: the text of the autoregressive mode, whatever is drafted."""

import re
from typing import Any

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.request_options.errors import InvalidRequestError
from tests.model_executor.test_lora import assert_same_parameters, parameters
from tests.support.engines import assert_nothing_left, generate, responses, scheduler_of
from tests.support.quantized_checkpoints import quantize
from tests.support.random_requests import any_text
from tests.support.stepped_engines import run_in_steps
from tests.support.tiny_checkpoints import write_adapter

PROMPTS = [[*range(3, 20)], [7, 90, 41], [*range(200, 240)], [*range(3, 20), 55, 9]]
ROUNDS: list[dict[str, Any]] = [
    {"block_length": 8},
    {"block_length": 5, "threshold": 0.5},
    {"block_length": 2},
    {"block_length": 32},
]
LENGTH = 40
ANY_TEXT = any_text(150, set()).packed


def asked(decoding: Any, **fields) -> DiffusionParams:
    return DiffusionParams(
        gen_length=LENGTH, ignore_eos=True, decoding=decoding, **fields
    )


@pytest.fixture(scope="module")
def checkpoint(reference_checkpoints):
    return reference_checkpoints / "nemotron-labs-diffusion-spec-tiny-a"


@pytest.fixture(scope="module")
def engine(engines, checkpoint):
    def start(**settings):
        settings = {"page_size": 8, "enable_prefix_caching": True, **settings}
        return engines(checkpoint, **settings)

    return start


@pytest.fixture(scope="module")
def expected(engine):
    """One token at a time, each request alone: texts and log-probabilities."""

    def answer(**fields):
        llm = engine()
        return [
            generate(llm, [prompt], asked("autoregressive", **fields))[0].outputs[0]
            for prompt in PROMPTS
        ]

    return answer


def texts(completions) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "seed": 4},
        {"logit_bias": {140: -5.0}, "min_tokens": 20, "stop_token_ids": [56, 28]},
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cache_method": "block", "cache_options": {"draft_lora": "linear_spec_lora"}},
        {
            "cache_method": "none",
            "steps_per_dispatch": 4,
            "enable_prefix_caching": None,
        },
        {"max_num_batched_tokens": 40, "max_num_seqs": 8, "steps_per_dispatch": 8},
    ],
)
def test_the_text_is_the_autoregressive_one(engine, expected, fields, settings):
    """Beside requests of the other modes, which join at other steps, and with the same
    seed also where tokens are drawn."""
    llm = engine(**settings)
    params = [asked("self_speculation", **fields, **rounds) for rounds in ROUNDS]
    others = [asked("diffusion", block_length=8), asked("autoregressive")]
    run = run_in_steps(
        llm,
        [*PROMPTS, *PROMPTS[:2]],
        [*params, *others],
        joins=[0, 1, 5, 2, 3, 1],
    )

    assert run.tokens[:4] == texts(expected(**fields))
    if not fields:
        assert run.tokens[5] == texts(expected())[1]
        assert run.figures[0].forward_passes < 2 * LENGTH
    assert_nothing_left(llm)


@pytest.mark.parametrize("weights", ["quantized", "merged", "read again"])
def test_drafts_have_their_adapter_whatever_the_weights_are(
    engines, checkpoint, tmp_path, weights
):
    """Merged: with another adapter, for all rows."""
    draft = {"cache_options": {"draft_lora": "linear_spec_lora"}}
    settings: dict[str, Any] = {}
    if weights == "quantized":
        checkpoint = quantize(checkpoint, tmp_path / weights, "int8")
    elif weights == "merged":
        modules = [f"encoder.layers.{i}.self_attn.o_proj" for i in range(2)]
        adapter = write_adapter(tmp_path / "adapter", checkpoint, modules)
        settings["lora_path"] = str(adapter)
    llm = engines(checkpoint, cache_method="block", page_size=8, **settings, **draft)
    before = parameters(llm)
    if weights == "read again":
        llm.collective_rpc("reload_weights")

    drafted = asked("self_speculation", block_length=8)
    found = responses(llm, PROMPTS[:2], drafted)
    expected = responses(llm, PROMPTS[:2], asked("autoregressive"))

    assert_same_parameters(parameters(llm), before)
    assert found == expected


def test_log_probabilities_and_the_stream_are_those_of_verified_tokens(
    engine, expected
):
    llm, params = engine(), asked("self_speculation", block_length=8, logprobs=2)
    alone = expected(logprobs=2)
    llm.llm_engine.add_request("0", {"prompt_token_ids": PROMPTS[0]}, params)
    received: list[int] = []
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens = list(output.outputs[0].token_ids)
            assert tokens[: len(received)] == received
            received = tokens

    assert received == list(alone[0].token_ids)
    for verified, one in zip(
        output.outputs[0].logprobs, alone[0].logprobs, strict=True
    ):
        assert [*verified] == [*one]
        for token, logprob in verified.items():
            assert logprob.logprob == pytest.approx(one[token].logprob, abs=1e-3)


def test_a_request_that_loses_its_pages_goes_on_with_its_drafts(engine, expected):
    llm, lost = engine(enable_prefix_caching=False), []
    scheduler = scheduler_of(llm)

    def preempt_drafted():
        drafted = [state for state in scheduler.running if state.progress.revises]
        for state in drafted[: len(lost) % 3]:
            scheduler._preempt(state)
        lost.append(len(drafted))

    params = [asked("self_speculation", **rounds) for rounds in ROUNDS]
    run = run_in_steps(llm, PROMPTS, params, after_step=preempt_drafted)

    assert sum(lost) > 10
    assert run.tokens == texts(expected())


def test_modes_share_the_pages_of_equal_beginnings(engine, expected):
    llm, modes = engine(), ("self_speculation", "autoregressive", "diffusion")
    first = texts(expected())[2]
    for writer in modes:
        for reader in modes:
            llm.reset_prefix_cache()
            (written,) = generate(llm, [PROMPTS[2]], asked(writer))
            text = PROMPTS[2] + list(written.outputs[0].token_ids)
            (alone,) = generate(
                engine(enable_prefix_caching=False), [text], asked(reader)
            )
            (answer,) = generate(llm, [text], asked(reader))
            # All but the token whose row was never computed, in whole pages.
            assert answer.num_cached_tokens >= (len(text) - 1) // 8 * 8 - 8
            assert answer.outputs[0].token_ids == alone.outputs[0].token_ids
            if writer != "diffusion":
                assert list(written.outputs[0].token_ids) == first


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps_per_block": 2}, "decoding=self_speculation and steps_per_block=2: "),
        ({"tokens_per_step": 2}, "decoding=self_speculation and tokens_per_step=2: "),
        ({"unmasking": "p2"}, "decoding=self_speculation needs that decided tokens"),
        (
            {"extra_args": {"constraint": ANY_TEXT}},
            "decoding='self_speculation' takes tokens back, which structured output",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(
    engines, tiny_nemotron_labs, fields, said
):
    llm = engines(tiny_nemotron_labs)
    with pytest.raises((InvalidRequestError, ValueError), match=re.escape(said)):
        generate(llm, [[1, 2]], asked("self_speculation", **fields))


def test_parts_of_blocks_are_not_kept_for_it(engines, tiny_nemotron_labs):
    llm = engines(
        tiny_nemotron_labs,
        cache_method="block",
        cache_options={"sub_block_cache": True},
    )
    with pytest.raises(InvalidRequestError, match="sub_block_cache keeps parts of"):
        generate(llm, [[1, 2]], asked("self_speculation"))
