"""The fields that streamed chunks get, without a server."""

import asyncio
import json
from types import SimpleNamespace

from dllm_engine.figures import DiffusionFigures
from dllm_engine.response_fields import add_to_stream


def completion(index=0, *, passes=1, finish_reason=None, trace=None):
    return SimpleNamespace(
        index=index, finish_reason=finish_reason, diffusion=DiffusionFigures(passes, passes, 2, 9, trace=trace or {})
    )


def event(**chunk) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def choices_of(result):
    return [(c.index, c) for c in result]


def stream(results, make_events) -> list:
    """The chunks that a client would receive."""

    async def received():
        async def source():
            for result in results:
                yield result

        return [e async for e in add_to_stream(make_events, source(), choices_of)]

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


def test_errors_and_other_models_pass_unchanged():
    async def failing(results):
        async for _ in results:
            yield event(choices=[{"index": 0, "text": "a"}])
            yield event(error={"message": "no"})

    other_model = SimpleNamespace(index=0, finish_reason=None)
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
        events = add_to_stream(chunk_per_completion, endless(), choices_of)
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
