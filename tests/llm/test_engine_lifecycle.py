"""Requests coming, going and being aborted in a running engine: nothing is lost and nothing is left."""

import pytest

from dllm_engine import DiffusionParams
from tests.support.engines import assert_nothing_left, generate, runner_of, scheduler_of

PROMPT = [3, 1, 4, 1, 5]


def params(gen_length: int = 16, **settings):
    return DiffusionParams(gen_length=gen_length, **({"block_length": 8, "ignore_eos": True} | settings))


def add(llm, name: str) -> str:
    return llm.llm_engine.add_request(name, {"prompt_token_ids": PROMPT}, params())


def finish(llm) -> dict[str, list[int]]:
    """Run to the end; the responses by the request's number in its name."""
    responses = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                responses[output.request_id] = list(output.outputs[0].token_ids)
    return responses


@pytest.fixture
def llm(engines, tiny_llada):
    llm = engines(tiny_llada, max_num_seqs=8)
    yield llm
    assert_nothing_left(llm)


def test_pause_keeps_requests_and_resume_finishes_them(llm):
    expected = list(generate(llm, [PROMPT], params())[0].outputs[0].token_ids)
    core = llm.llm_engine.engine_core.engine_core
    add(llm, "a")
    for _ in range(3):
        llm.llm_engine.step()
    core.pause_scheduler("keep")
    for _ in range(3):
        assert llm.llm_engine.step() == []
    assert core.is_scheduler_paused()
    core.resume_scheduler()
    assert finish(llm) == {"a": expected}


def test_pause_by_abort_drops_what_runs(llm):
    core = llm.llm_engine.engine_core.engine_core
    add(llm, "a")
    llm.llm_engine.step()
    core.pause_scheduler("abort")
    assert not scheduler_of(llm).states
    core.resume_scheduler()
    llm.llm_engine.abort_request(["a"])


def test_the_trace_is_refused_by_name_where_none_is_recorded(engines, tiny_llada):
    llm = engines(tiny_llada, trace=False)
    with pytest.raises(ValueError, match=r"trace=True: the engine records no trace; start it with trace=True"):
        generate(llm, [PROMPT], params(trace=True))
    (output,) = generate(llm, [PROMPT], params())
    with pytest.raises(ValueError, match="trace=True"):
        _ = output.outputs[0].diffusion.unmasked_per_step
    assert "trace" not in output.outputs[0].diffusion.to_json()
    assert output.outputs[0].diffusion.forward_passes == 16


@pytest.mark.parametrize("cache_method", ["none", "dllm_cache"])
@pytest.mark.parametrize(("family", "rows"), [("llada", [8, 6, 4, 2] * 2), ("dream", [1, 7, 5, 3] * 2)])
def test_logits_are_computed_for_the_masked_positions_of_the_block_only(
    engines, request, monkeypatch, family, rows, cache_method
):
    """Rows through the head: what may be unmasked in the current block, and nothing at a finished one. (Dream's first
    step of a block is about its first position.)"""
    llm = engines(request.getfixturevalue(f"tiny_{family}"), cache_method=cache_method)
    predictor, found = runner_of(llm).predictor, []
    compute = predictor.compute_logits
    monkeypatch.setattr(predictor, "compute_logits", lambda hidden: found.append(len(hidden)) or compute(hidden))
    generate(llm, [PROMPT], params(gen_length=16, block_length=8, steps=8))
    assert found == rows
