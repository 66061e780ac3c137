"""Numbers at the edges of what a request may state: answered in bounded passes, or refused by name; nothing else."""

import itertools
import json
import math

import pytest
from vllm.exceptions import VLLMValidationError

from dllm_engine import DiffusionParams
from dllm_engine.scheduler.options.request_fields import RequestOptions
from tests.support.engines import assert_nothing_left, tokens_of
from tests.support.http_app import served
from tests.support.plans import FULL_METHODS

EXTREMES = [0, -1, 2**31, 10**12, 2**63 - 1, 2**63, 10**30, 1e308, 5e-324, 1e-30, math.nan, math.inf, -math.inf]
PROMPT = [3, 1, 4, 1, 5]
REQUEST = {"gen_length": 8, "block_length": 4, "ignore_eos": True}
VLLMS_NUMBERS = [
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "stop_token_ids", "thinking_token_budget",
    "stream_interval", "priority",
]  # fmt: skip
GUIDES_NUMBERS = [name for name in RequestOptions.model_fields if name.startswith(("guide", "speculation"))]
BEYOND_64_BITS = "extra_args integers must be between -2**63 and 2**64 - 1"
"""vLLM's refusal, which names no option."""


def ask(llm, name, value, temperature):
    """One request with an odd number; its output, or None if it is refused."""
    settings = REQUEST | {"temperature": temperature}
    priority = value if name == "priority" else 0
    if name == "max_tokens":
        del settings["gen_length"]
    if name != "priority":
        settings[name] = [value] if name == "stop_token_ids" else value
    shown = "gen_length" if name == "max_tokens" else name
    try:
        params = DiffusionParams(**settings)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, priority=[priority], use_tqdm=False)
    except (ValueError, VLLMValidationError) as error:
        message = str(error)
        assert shown in message or name in message or BEYOND_64_BITS in message, message
        return None
    return output


def walk(llm, names, turn=None):
    """Every option with every number, greedy and sampled, or by turns with a quarter of them. None may change what
    others are answered."""
    expected = tokens_of(llm, PROMPT, **REQUEST)
    numbers = EXTREMES if turn is None else EXTREMES[turn % 4 :: 4]
    for name in names:
        for number, value in enumerate(numbers):
            for temperature in (0.0, 1.0) if turn is None else [float((number + turn // 4) % 2)]:
                output = ask(llm, name, value, temperature)
                if output is not None:
                    (completion,) = output.outputs
                    assert completion.diffusion.forward_passes <= REQUEST["gen_length"], (name, value)
                    assert len(completion.token_ids) == REQUEST["gen_length"], (name, value)
        assert_nothing_left(llm)
        assert not llm.llm_engine.output_processor.request_states, name
        assert tokens_of(llm, PROMPT, **REQUEST) == expected, name


TURNS = list(enumerate(zip(FULL_METHODS, itertools.cycle(("llada", "dream")))))
"""Each method takes its turn, with one family: together they see every option with every number."""


@pytest.fixture
def engine(engines, request):
    def make(method, family):
        return engines(request.getfixturevalue(f"tiny_{family}"), cache_method=method, page_size=8)

    return make


@pytest.mark.parametrize(("turn", "served_by"), TURNS, ids=str)
def test_our_options(engine, turn, served_by):
    walk(engine(*served_by), RequestOptions.model_fields, turn)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_vllms_parameters(engine, family):
    walk(engine("none", family), VLLMS_NUMBERS)


def test_a_guides_options(engines):
    walk(engines("demo", guide_model="demo", skip_tokenizer_init=False), GUIDES_NUMBERS)


def test_temperature_at_its_edges_is_sampling(engines, tiny_llada):
    """The coolest and the hottest that vLLM allows: no infinite or undefined number on the way."""
    llm = engines(tiny_llada)
    greedy = tokens_of(llm, PROMPT, **REQUEST)
    assert tokens_of(llm, PROMPT, **REQUEST, temperature=5e-324, seed=1) == greedy
    assert tokens_of(llm, PROMPT, **REQUEST, temperature=2.0, seed=1) != greedy


def ask_over_http(client, name, value, stream):
    """The status and the body of an answer to one request with an odd number, as text: JSON has no NaN of its own."""
    body = {"model": "served", "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "stream": stream}
    if name in RequestOptions.model_fields and name not in ("top_p", "top_k"):
        body["vllm_xargs"] = {"block_length": 4, name: value}
    else:
        body |= {"vllm_xargs": {"block_length": 4}, name: [value] if name == "stop_token_ids" else value}
    answer = client.post("/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"})
    return answer.status_code, answer.text


@pytest.mark.parametrize(("turn", "served_by"), TURNS, ids=str)
def test_over_http(engine, turn, served_by):
    """The numbers as a client sends them; an answer, or a refusal with a sentence, streamed or not."""
    llm = engine(*served_by)
    client = served(llm, "--served-model-name", "served", "--skip-tokenizer-init")
    expected = tokens_of(llm, PROMPT, **REQUEST)
    for number, name in enumerate([*RequestOptions.model_fields, *VLLMS_NUMBERS]):
        for value in EXTREMES[(number + turn) % len(TURNS) :: len(TURNS)]:
            status, text = ask_over_http(client, name, value, stream=bool((number + turn // 3) % 2))
            assert status in (200, 400), (name, value, text[:300])
            assert '"code":500' not in text.replace(" ", ""), (name, value, text[:300])
    assert_nothing_left(llm)
    assert tokens_of(llm, PROMPT, **REQUEST) == expected
