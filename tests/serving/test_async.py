"""vLLM's ``AsyncLLM``: streaming from Python, with the engine in a process of its own."""

import asyncio
from contextlib import contextmanager

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.demo import demo_model_path
from tests.support.sharded import import_once

pytestmark = pytest.mark.slow

PROMPT = "Tom=48. Ida=07. Max=31. Give: Ida, Tom"
ENGINE = {"max_model_len": 256, "dtype": "float32", "kv_cache_memory_bytes": 64 << 20}


def parameters(**settings):
    return DiffusionParams(gen_length=32, block_length=8, ignore_eos=True, **settings)


@pytest.fixture
def expected(engines):
    llm = engines(demo_model_path(), **ENGINE, skip_tokenizer_init=False, cache_method="sparse", trace=False)
    return llm.generate([PROMPT], parameters(logprobs=0), use_tqdm=False)[0].outputs[0]


@contextmanager
def started(**settings):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(demo_model_path(), **ENGINE, **settings, enable_log_requests=False)
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        yield engine
    finally:
        engine.shutdown()


async def collected(engine, name, params) -> list:
    return [output.outputs[0] async for output in engine.generate(PROMPT, params, name)]


async def streams() -> dict[str, list]:
    """Three requests of one engine, answered together."""
    from vllm.sampling_params import RequestOutputKind

    with started(additional_config={"dllm": {"cache_method": "sparse"}}) as engine:
        wanted = {"steps": parameters(stream_granularity="step", logprobs=0)}
        wanted |= {name: parameters() for name in ("blocks", "whole")}
        wanted["steps"].output_kind = wanted["blocks"].output_kind = RequestOutputKind.DELTA
        wanted["whole"].output_kind = RequestOutputKind.FINAL_ONLY
        answers = await asyncio.gather(*(collected(engine, name, params) for name, params in wanted.items()))
        return dict(zip(wanted, answers, strict=True))


def test_streams_by_step_and_by_block_are_the_offline_response(expected, monkeypatch):
    monkeypatch.setattr("vllm.v1.engine.utils.get_mp_context", import_once)
    answers = asyncio.run(asyncio.wait_for(streams(), timeout=300))
    for name, outputs in answers.items():
        assert "".join(o.text for o in outputs) == expected.text, name
        assert [token for o in outputs for token in o.token_ids] == list(expected.token_ids), name
        assert outputs[-1].diffusion == expected.diffusion, name
    assert 1 < len(answers["blocks"]) <= 4, "vLLM joins what waits for a slow reader"
    assert len(answers["whole"]) == 1
    blocks = [o.provisional for o in answers["steps"]]
    passes = [b.forward_pass for b in blocks]
    assert passes == sorted(set(passes))
    assert set(passes) >= {8, 16, 24, 32}, "only steps within a block are left out for a slow reader"
    assert blocks[-1].token_ids == list(expected.token_ids)[24:]
    assert [b.text.count("░") for b in blocks] == [-number % 8 for number in passes]
    logprobs = [entry for o in answers["steps"] for entry in o.logprobs]
    values = [entry[token].logprob for token, entry in zip(expected.token_ids, logprobs, strict=True)]
    assert values == pytest.approx([e[t].logprob for t, e in zip(expected.token_ids, expected.logprobs, strict=True)])
