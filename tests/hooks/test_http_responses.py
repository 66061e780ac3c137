"""The fields that streamed chunks get, without a server."""

import asyncio
import json
import pickle
from types import SimpleNamespace

import pytest
from vllm.exceptions import GenerationError
from vllm.outputs import CompletionOutput, RequestOutput

from dllm_engine.figures import DiffusionFigures, ErrorReason
from dllm_engine.plugin import register
from dllm_engine.provisional import ProvisionalBlock
from dllm_engine.vllm_hooks import patch, table
from dllm_engine.vllm_hooks.server.responses import stream_with_fields


def block(*, masked) -> ProvisionalBlock:
    """Two positions, the first of them filled."""
    pieces = ["a", None if masked else "b"]
    return ProvisionalBlock(
        block=0, num_blocks=1, gen_length=2, block_length=2, first_block_length=2, start=0, step=1,
        forward_pass=1, sent=0, token_ids=[7, 8], masked=[False, masked], confidences=[0.5, 0.25],
        pieces=pieces, special=[False, False],
    )  # fmt: skip


def engine_output(*, index=0, tokens=(), shown=None, finish_reason=None):
    made = CompletionOutput(index, "x" * len(tokens), list(tokens), None, None, finish_reason=finish_reason)
    made.diffusion, made.provisional = DiffusionFigures(1, 1, 1, 1), shown
    return RequestOutput("r", "a", [1], None, [made], finished=finish_reason is not None)


def with_fields(make_events, results):
    return stream_with_fields(make_events, results, lambda result: [(c.index, c) for c in result.outputs], {})


async def chunks(results):
    async for result in results:
        yield f'data: {{"choices":[{{"index":0,"text":"{result.outputs[0].text}"}}]}}\n\n'


def test_a_step_is_sent_while_the_next_result_is_not_there_yet():
    async def received():
        more = asyncio.Event()

        async def source():
            yield engine_output(shown=block(masked=True))
            await more.wait()
            yield engine_output(tokens=[5], finish_reason="stop")

        events = with_fields(chunks, source())
        first = await anext(events)
        more.set()
        return [first, *[e async for e in events]]

    first, text = asyncio.run(asyncio.wait_for(received(), timeout=10))
    assert '"provisional"' in first
    assert '"text":"x"' in text
    assert '"diffusion"' in text


def test_a_client_that_hangs_up_closes_the_engines_results():
    closed = []

    async def endless():
        try:
            while True:
                yield engine_output(tokens=[5])
        finally:
            closed.append(True)

    async def hang_up():
        events = with_fields(chunks, endless())
        await anext(events)
        await events.aclose()
        await asyncio.sleep(0)

    asyncio.run(hang_up())
    assert closed == [True]


def test_a_request_that_failed_says_why_to_http_clients():
    """Also where its last output was merged with one before, or came from another process."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    register()
    patch.apply(table.SERVING)

    def output(tokens, finish_reason):
        made = CompletionOutput(0, "x" * len(tokens), tokens, None, None, finish_reason=finish_reason)
        return RequestOutput("r", None, [1], None, [made], finished=finish_reason is not None)

    merged = output([5], None)
    merged.add(output([], ErrorReason("logits are NaN")), aggregate=True)
    for reason in (merged.outputs[0].finish_reason, pickle.loads(pickle.dumps(ErrorReason("logits are NaN")))):
        assert reason == "error"
        with pytest.raises(GenerationError, match="logits are NaN"):
            GenerateBaseServing._raise_if_error(None, reason, "r")
    with pytest.raises(GenerationError, match="Internal server error"):
        GenerateBaseServing._raise_if_error(None, "error", "r")
    GenerateBaseServing._raise_if_error(None, "stop", "r")


# vLLM's own generators


def vllm_stream(endpoint, results, n=1) -> list[str]:
    """The events that vLLM's generator, as this package changes it, makes of an engine's results."""
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    patch.apply(table.SERVING)
    is_chat = endpoint == "chat"
    serving = object.__new__(OpenAIServingChat if is_chat else OpenAIServingCompletion)
    for name, value in {
        "model_config": SimpleNamespace(is_dllm_engine=True), "enable_force_include_usage": False, "parser_cls": None,
        "system_fingerprint": None, "enable_prompt_tokens_details": False, "enable_per_request_metrics": False,
        "response_role": "assistant", "enable_log_outputs": False, "_include_reasoning_tokens_details": False,
        "log_error_stack": False,
    }.items():  # fmt: skip
        setattr(serving, name, value)
    metadata = RequestResponseMetadata(request_id="r")

    async def source():
        for result in results:
            if isinstance(result, Exception):
                raise result
            yield result if is_chat else (0, result)

    if is_chat:
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], stream=True, n=n)
        events = serving.chat_completion_stream_generator(request, source(), "r", "demo", [], None, metadata)
    else:
        request = CompletionRequest(prompt="a", max_tokens=8, stream=True, n=n)
        events = serving.completion_stream_generator(request, [None], source(), "r", 7, "demo", 1, None, metadata)

    async def received():
        return [e async for e in events]

    return asyncio.run(received())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("end", ["error", "an exception"])
@pytest.mark.parametrize("granularity", ["block", "step"])
@pytest.mark.parametrize("num_blocks", [0, 1])
def test_vllms_generators_end_a_cut_off_stream_with_an_error_event(endpoint, end, granularity, num_blocks):
    shown = granularity == "step"
    results = [engine_output(shown=block(masked=True))] if shown else []
    results += [engine_output(tokens=[5], shown=block(masked=False) if shown else None)] * num_blocks
    results.append(engine_output(finish_reason="error") if end == "error" else RuntimeError("the engine died"))
    *_, error, done = vllm_stream(endpoint, results, n=2)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 500
    assert done == "data: [DONE]\n\n"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_stream_by_step_has_the_usual_chunks_of_one_by_block(endpoint):
    by_block = vllm_stream(endpoint, [engine_output(tokens=[5, 6], finish_reason="stop")])
    finished = engine_output(tokens=[5, 6], shown=block(masked=False), finish_reason="stop")
    by_step = vllm_stream(endpoint, [engine_output(shown=block(masked=True)), finished])
    usual = [e for e in by_step if "provisional" not in e]

    def without_time(events):
        return [[json.loads(e[6:]) | {"created": 0} if e.startswith("data: {") else e] for e in events]

    assert without_time(usual) == without_time(by_block)
    steps = [json.loads(e.removeprefix("data: ")) for e in by_step if "provisional" in e]
    assert [step["choices"] for step in steps] == [[], []]
    of_stream = [json.loads(e.removeprefix("data: ")) for e in usual if e.startswith("data: {")]
    assert len({(chunk["id"], chunk["created"]) for chunk in (*steps, *of_stream)}) == 1
    assert by_step.index(usual[0]) == 2, "the role too comes with the first text, so that it is not taken for a token"
