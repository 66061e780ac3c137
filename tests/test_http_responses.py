"""The fields that streamed chunks get, without a server."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from dllm_engine.figures import DiffusionFigures
from dllm_engine.vllm_hooks.http_responses import StreamFields, stream_with_fields


def completion(index=0, *, passes=1, finish_reason=None, trace=None, shown=None, tokens=(5,)):
    return SimpleNamespace(
        index=index,
        finish_reason=finish_reason,
        token_ids=list(tokens),
        diffusion=DiffusionFigures(passes, passes, 2, 9, trace=trace or {}),
        provisional=shown,
    )


def step(index=0, *, passes):
    """A completion that only shows a block."""
    shown = SimpleNamespace(to_json=lambda: {"forward_pass": passes})
    return completion(index, passes=passes, shown=shown, tokens=())


def event(**chunk) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def choices_of(result):
    return [(c.index, c) for c in result]


def with_fields(make_events, results):
    fields = StreamFields({"text": ""})
    return stream_with_fields(make_events, results, choices_of, lambda result: [], fields)


def stream(results, make_events) -> list:
    """The chunks that a client would receive."""

    async def received():
        async def source():
            for result in results:
                yield result

        return [e async for e in with_fields(make_events, source())]

    events = asyncio.run(received())
    return [e if e == "data: [DONE]\n\n" else json.loads(e.removeprefix("data: ")) for e in events]


async def chunk_per_completion(results):
    async for result in results:
        for c in result:
            yield event(choices=[{"index": c.index, "text": "é"}])
    yield event(choices=[], usage={"total_tokens": 3})
    yield "data: [DONE]\n\n"


def test_each_chunk_has_the_figures_of_its_choice_so_far():
    results = [[completion(0, passes=1)], [completion(0, passes=2), completion(1, passes=7)]]
    *chunks, usage, done = stream(results, chunk_per_completion)
    assert [c["choices"][0]["diffusion"]["forward_passes"] for c in chunks] == [1, 2, 7]
    assert [c["choices"][0]["text"] for c in chunks] == ["é"] * 3
    assert usage == {"choices": [], "usage": {"total_tokens": 3}}
    assert done == "data: [DONE]\n\n"


def test_the_chunk_that_names_the_role_has_none():
    async def role_first(results):
        async for _ in results:
            yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
            yield event(choices=[{"index": 0, "delta": {"content": "x"}}])

    role, text = stream([[completion()]], role_first)
    assert "diffusion" not in role["choices"][0]
    assert "diffusion" in text["choices"][0]


def test_the_trace_comes_with_the_last_chunk_only():
    trace = {"refresh_states": ["full"]}
    results = [[completion(trace=trace)], [completion(trace=trace, finish_reason="stop")]]
    first, last, *_ = stream(results, chunk_per_completion)
    assert "trace" not in first["choices"][0]["diffusion"]
    assert last["choices"][0]["diffusion"]["trace"] == trace


async def chat_chunks(results):
    """As vLLM: the role with the first result, then a chunk per completion that brings something."""
    opened = False
    async for result in results:
        if not opened:
            yield event(id="chat-1", created=7, choices=[{"index": 0, "delta": {"role": "assistant"}}])
        opened = True
        for c in result:
            if c.token_ids:
                yield event(id="chat-1", created=7, choices=[{"index": c.index, "delta": {"content": "x"}}])
    yield "data: [DONE]\n\n"


def test_steps_have_chunks_of_their_own_after_the_role_and_before_their_block():
    finished = completion(passes=2, shown=step(passes=2).provisional, finish_reason="stop")
    role, first, second, block, done = stream([[step(passes=1)], [finished]], chat_chunks)
    assert role["choices"][0]["delta"] == {"role": "assistant"}
    assert [c["choices"][0].get("provisional") for c in (role, first, second, block)] == [
        None, {"forward_pass": 1}, {"forward_pass": 2}, None,
    ]  # fmt: skip
    assert block["choices"][0]["delta"] == {"content": "x"}
    assert {(c["id"], c["created"]) for c in (role, first, second, block)} == {("chat-1", 7)}
    assert first["choices"][0]["diffusion"]["forward_passes"] == 1
    assert done == "data: [DONE]\n\n"


def test_a_step_is_sent_while_the_next_result_is_not_there_yet():
    async def received():
        more = asyncio.Event()

        async def source():
            yield [step(passes=1)]
            await more.wait()
            yield [completion(passes=2)]

        events = with_fields(chat_chunks, source())
        role, first = await anext(events), await anext(events)
        more.set()
        return [role, first, *[e async for e in events]]

    _, first, block, _ = asyncio.run(asyncio.wait_for(received(), timeout=10))
    assert '"provisional"' in first
    assert '"content":"x"' in block


def test_an_error_of_vllms_generator_reaches_the_server():
    async def broken(results):
        async for _ in results:
            raise RuntimeError("broken")
        yield ""

    with pytest.raises(RuntimeError, match="broken"):
        stream([[completion()]], broken)


def test_errors_and_other_models_pass_unchanged():
    async def failing(results):
        async for _ in results:
            yield event(choices=[{"index": 0, "text": "a"}])
            yield event(error={"message": "no"})

    other_model = SimpleNamespace(index=0, finish_reason=None, token_ids=[5])
    assert stream([[other_model]], failing) == [
        {"choices": [{"index": 0, "text": "a"}]},
        {"error": {"message": "no"}},
    ]


def test_a_client_that_hangs_up_closes_the_engines_results():
    closed = []

    async def endless():
        try:
            while True:
                yield [completion()]
        finally:
            closed.append(True)

    async def hang_up():
        events = with_fields(chunk_per_completion, endless())
        await anext(events)
        await events.aclose()
        await asyncio.sleep(0)

    asyncio.run(hang_up())
    assert closed == [True]


def test_chunks_that_were_merged_on_the_way_have_the_figures_of_the_last():
    from vllm.outputs import CompletionOutput, RequestOutput

    from dllm_engine.plugin import register

    register()

    def output(passes, tokens):
        made = CompletionOutput(0, "x" * len(tokens), tokens, None, None)
        made.diffusion = completion(passes=passes).diffusion
        return RequestOutput("r", None, [1], None, [made], finished=False)

    merged = output(1, [5])
    merged.add(output(2, [6, 7]), aggregate=True)
    assert merged.outputs[0].token_ids == [5, 6, 7]
    assert merged.outputs[0].diffusion.forward_passes == 2
