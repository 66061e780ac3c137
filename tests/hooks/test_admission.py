"""The check of requests in vLLM's front ends, without a server."""

import asyncio
from types import SimpleNamespace

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.sampling_params import SamplingParams

from dllm_engine import DiffusionParams
from dllm_engine.scheduler.options.request_fields import RequestOptions
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.vllm_hooks import input_processor
from dllm_engine.vllm_hooks.input_processor import CheckedPrompt, generate_if_valid
from dllm_engine.vllm_hooks.server.bodies import create_if_known

PROMPT = {"type": "token", "prompt_token_ids": [3, 1, 4]}
PARAMS = {"gen_length": 16, "block_length": 8, "ignore_eos": True}


# Fields of a body


def created(request, ours=True):
    """The request that vLLM's handler gets."""

    async def create(self, request, raw_request=None):
        return request

    handler = SimpleNamespace(model_config=SimpleNamespace(is_dllm_engine=ours))
    return asyncio.run(create_if_known(create, handler, request))


BODIES = {
    "completions": (CompletionRequest, {"prompt": "x"}),
    "chat": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}]}),
    "responses": (ResponsesRequest, {"input": "x"}),
}


@pytest.mark.parametrize("endpoint", BODIES)
def test_every_option_is_read_in_vllm_xargs_or_a_field_of_vllms(endpoint):
    request_class, body = BODIES[endpoint]
    for name in RequestOptions.model_fields:
        if name not in request_class.model_fields:
            with pytest.raises(InvalidRequestError, match=name):
                created(request_class(**body, **{name: 1}))
            assert created(request_class(**body, **{name: 1}), ours=False)
    assert created(request_class(**body, vllm_xargs={"block_length": 8}, unknown=1))


# One check per request


@pytest.fixture
def engine(engines, tiny_llada, monkeypatch):
    """The part of ``AsyncLLM`` that the hooks see, and the requests that were checked."""
    llm = engines(tiny_llada)
    checked = []
    check_request = input_processor.check_request

    def counting(params, *args):
        checked.append(params)
        return check_request(params, *args)

    monkeypatch.setattr(input_processor, "check_request", counting)

    def generate(self, prompt, sampling_params, request_id, **kwargs):
        """As ``AsyncLLM.generate``, whose generator makes the request when it is first asked."""
        yield self.input_processor.process_inputs(request_id, prompt, sampling_params, ("generate",), **kwargs)

    engine = SimpleNamespace(
        model_config=llm.model_config, input_processor=llm.llm_engine.input_processor, checked=checked
    )
    engine.generate = lambda *args, **kwargs: generate_if_valid(generate, engine, *args, **kwargs)
    return engine


def test_a_request_is_checked_once_and_when_it_is_made(engine):
    results = engine.generate(PROMPT, DiffusionParams(**PARAMS), "a", priority=3)
    assert len(engine.checked) == 1
    (request,) = results
    assert len(engine.checked) == 1
    assert (request.request_id, request.priority, request.sampling_params.max_tokens) == ("a", 3, 16)
    assert type(request.sampling_params) is SamplingParams
    assert "request" not in PROMPT


def test_a_checked_prompt_that_is_used_again_is_checked_again(engine):
    """vLLM writes an id of its own into a request, so that two cannot share it."""
    prompt = CheckedPrompt(PROMPT)
    first, second = (next(engine.generate(prompt, DiffusionParams(**PARAMS), name)) for name in "ab")
    assert first is not second
    assert len(engine.checked) == 2


def test_a_response_longer_than_the_context_is_refused_before_anything_is_made_for_its_tokens(demo):
    params = DiffusionParams(gen_length=10**12, block_length=1, steps_per_block=1)
    with pytest.raises(InvalidRequestError, match="need a canvas of 1000000000003"):
        demo.llm_engine.input_processor.process_inputs("x", PROMPT, params, ("generate",))
