"""What cannot be served as asked: the error names the setting, its value and the way
out; the engine goes on.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams
from vllm.sampling_params import StructuredOutputsParams as Match

from dllm_engine import DiffusionParams
from dllm_engine.request_options.fields import RequestOptions
from tests.support.engines import assert_nothing_left, generate, tokens_of
from tests.support.tiny_checkpoints import MASK

PROMPT = [3, 1, 4, 1, 5, 9]
BEAMS = BeamSearchParams(beam_width=2, max_tokens=4)


@pytest.fixture(scope="module")
def llm(engines, tiny_llada):
    return engines(tiny_llada, max_model_len=128, cache_method="sparse")


@pytest.fixture(scope="module")
def healthy(llm) -> list[int]:
    return answer(llm)


SETTINGS: dict[str, Any] = {"gen_length": 16, "block_length": 8, "ignore_eos": True}


def answer(llm, **settings) -> list[int]:
    return tokens_of(llm, PROMPT, **(SETTINGS | settings))


def refuse(
    llm, healthy, *fragments: str, prompt=PROMPT, params=None, **settings
) -> None:
    """The request fails with a message that holds all ``fragments``, and the engine
    answers as before.
    """
    with pytest.raises((ValueError, VLLMValidationError)) as error:
        generate(llm, [prompt], params or DiffusionParams(**settings))
    for fragment in fragments:
        assert fragment in str(error.value), str(error.value)
    assert_nothing_left(llm)
    assert answer(llm) == healthy


def test_one_bad_prompt_among_good_ones_leaves_nothing_running(llm, healthy):
    with pytest.raises(ValueError, match="empty"):
        generate(
            llm, [PROMPT, [], PROMPT], DiffusionParams(gen_length=8, block_length=8)
        )
    assert_nothing_left(llm)
    assert answer(llm) == healthy


@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"prompt": []}, ("empty",)),
        ({"prompt": [5, 6, MASK, 7]}, (f"id {MASK}", "position 2")),
        (
            {"prompt": [7] * 100, "gen_length": 29},
            ("100 tokens", "gen_length=29", "129", "max_model_len is 128"),
        ),
        *[
            ({"prompt": [7] * n, "gen_length": 1, "block_length": 1}, (str(n), "128"))
            for n in (128, 200)
        ],
        *[
            ({"prompt": [5, token]}, (str(token), "vocabulary"))
            for token in (150, 5000, -1)
        ],
        ({"block_length": 9}, ("block_length=9", "1 … gen_length", "here 8")),
        (
            {"gen_length": 10**12, "block_length": 1, "steps_per_block": 1},
            ("need a canvas of 1000000000006",),
        ),
        (
            {"gen_length": 25, "steps": 3},
            ("steps=3", "4 blocks", "raise steps or block_length"),
        ),
        (
            {"extra_args": {"block_lenght": 8}},
            ("option 'block_lenght'=8; did you mean 'block_length'",),
        ),
        (
            {
                "min_tokens": 5,
                "gen_length": None,
                "response_template": [None, 5] * 4,
                "return_given": False,
            },
            ("min_tokens=5", "4 tokens come back", "0 … 4"),
        ),
        (
            {"logit_bias": {150: 1.0}},
            ("logit_bias holds 150", "vocabulary of 150", "leave it out"),
        ),
        ({"logit_bias": {5: float("nan")}}, ("logit_bias[5]=nan", "−10000 … 10000")),
        (
            {"logit_bias": dict.fromkeys(range(8193), 1.0)},
            ("logit_bias has 8193 tokens", "at most 8192"),
        ),
        (
            {"structured_outputs": Match(choice=["yes"])},
            ("structured_outputs", "skip_tokenizer_init"),
        ),
        (
            {"extra_args": {"cfg_scale": 1.5}},
            ("cfg_scale", "classifier-free guidance", "not supported"),
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_what_cannot_be_served(llm, healthy, settings, fragments):
    refuse(
        llm, healthy, *fragments, **({"gen_length": 8, "block_length": 8} | settings)
    )


ODD = [
    True,
    False,
    None,
    0,
    -1,
    1.5,
    1e-30,
    5e-324,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    2**31,
    10**12,
    2**63,
    10**400,
    "x",
    "1",
    b"x",
    object(),
    [],
    ["x"],
    [True],
    [1.5],
    [2**70],
    {},
    {"a": 1},
    {1: "x"},
    np.int64(1),
    np.float64(0.5),
    np.True_,
    1j,
]
"""Values of which each field can have few."""
FIELDS = [name for name in SamplingParams.__struct_fields__ if name[0] != "_"]
NAMELESS: tuple[str, ...] = (
    "extra_args integers must be between -2**63 and 2**64 - 1",
    "the request cannot be sent to the engine",
)
NAMELESS += ("unknown request option 'a'",)
"""Refusals that name another option or none."""


def answer_or_refuse(llm, healthy, field: str) -> int:
    """Ask with every odd value: it is answered in bounded passes, or refused by name,
    and changes nothing for others. Returns the number of values that were answered."""
    num_answered = 0
    for value in [*ODD, 10**5000] if field in FIELDS else ODD:
        params = SamplingParams(
            max_tokens=8, temperature=0.5, top_k=3, seed=1, ignore_eos=True
        )
        try:
            if field in FIELDS:
                setattr(params, field, value)
            else:
                params = DiffusionParams(**SETTINGS | {field: value})
            (output,) = generate(llm, [PROMPT], params)
        except (ValueError, VLLMValidationError) as error:
            assert any(named in str(error) for named in (field, *NAMELESS)), error  # noqa: PT017
        else:
            num_answered += 1
            assert all(
                completion.diffusion.forward_passes <= 128
                for completion in output.outputs
            ), value
    assert_nothing_left(llm)
    assert not llm.llm_engine.output_processor.request_states
    assert answer(llm) == healthy
    return num_answered


@pytest.mark.parametrize(
    "field",
    [*FIELDS, *(name for name in RequestOptions.model_fields if name not in FIELDS)],
)
def test_odd_values(llm, healthy, field):
    num_answered = answer_or_refuse(llm, healthy, field)
    # vLLM's `LLM` sets the kind of outputs.
    assert num_answered <= (5 if field in FIELDS else 16) or field == "output_kind"


@pytest.mark.parametrize(
    "field",
    [
        name
        for name in RequestOptions.model_fields
        if name.startswith(("guide", "spec"))
    ],
)
def test_odd_values_of_a_guides_options(engines, field):
    llm = engines("demo", guide_model="demo", skip_tokenizer_init=False)
    answer_or_refuse(llm, answer(llm), field)


def test_temperature_at_its_edges_is_sampling(llm, healthy):
    """The coolest and the hottest that vLLM allows: no infinite or undefined number on
    the way.
    """
    assert tokens_of(llm, PROMPT, **SETTINGS, temperature=5e-324, seed=1) == healthy
    assert tokens_of(llm, PROMPT, **SETTINGS, temperature=2.0, seed=1) != healthy


def test_embeddings_adapters_and_beams(llm, healthy):
    prompt = {"prompt_token_ids": PROMPT}
    params = DiffusionParams(gen_length=8)
    adapter = LoRARequest("adapter", 1, "/nowhere")
    for call, message in (
        (
            lambda: llm.generate([{"prompt_embeds": torch.zeros(4, 64)}], params),
            "embed",
        ),
        (
            lambda: llm.generate([prompt], params, lora_request=adapter),
            r"lora_request: .* lora_path",
        ),
        (lambda: llm.beam_search([prompt], BEAMS), "beam search is not supported"),
        (
            lambda: vllm.LLM.beam_search(llm, [prompt], BEAMS),
            "beam search is not supported",
        ),
    ):
        with pytest.raises((ValueError, VLLMValidationError), match=message):
            call()
    assert_nothing_left(llm)
    assert answer(llm) == healthy


def test_the_trace_is_refused_by_name_where_none_is_recorded(engines, tiny_llada):
    llm = engines(tiny_llada, trace=False)
    with pytest.raises(
        ValueError,
        match=r"trace=True: the engine records no trace; start it with trace=True",
    ):
        generate(llm, [PROMPT], DiffusionParams(**SETTINGS, trace=True))
    figures = (
        generate(llm, [PROMPT], DiffusionParams(**SETTINGS))[0].outputs[0].diffusion
    )
    with pytest.raises(ValueError, match="trace=True"):
        _ = figures.unmasked_per_step
    assert "trace" not in figures.to_json()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cache_metod": "none"},
            "unknown engine option 'cache_metod'='none'; did you mean 'cache_method'",
        ),
        ("none", r"additional_config\['dllm'\]='none'"),
    ],
)
def test_option_is_refused_by_stock_vllm_too(tiny_llada, options, message):
    with pytest.raises(ValueError, match=message):
        vllm.LLM(
            str(tiny_llada),
            skip_tokenizer_init=True,
            additional_config={"dllm": options},
        )
