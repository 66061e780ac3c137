"""Token editing (LLaDA2.1) is that of the authors' ``generate``: tokens, order, edits
and forward passes.
"""

import math
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.constraints.automaton import unpacked
from dllm_engine.constraints.constraint import Constraint
from dllm_engine.families import LLADA, LLADA2
from dllm_engine.request_options.errors import InvalidRequestError
from tests.support.answers import params_of
from tests.support.engines import assert_nothing_left, generate, runner_of, scheduler_of
from tests.support.fake_cuda_graphs import record_steps
from tests.support.plans import resolved
from tests.support.random_requests import in_constraints
from tests.support.reference_cases import Case, reference_cases
from tests.support.stepped_engines import Poison, run_in_steps

CASES = reference_cases("token_editing")
MODEL = "llada2-moe-tiny-a"


@pytest.fixture
def llm(engines, reference_checkpoints):
    llm = engines(reference_checkpoints / MODEL, max_model_len=512, page_size=16)
    llm.reset_prefix_cache()
    return llm


def ask(llm, cases: list[Case], **more: Any) -> list[Any]:
    params = [params_of(case["fields"] | more) for case in cases]
    outputs = generate(llm, [case["prompt_ids"] for case in cases], params)
    assert_nothing_left(llm)
    return [output.outputs[0] for output in outputs]


def response_of(case: Case) -> list[int]:
    """Up to the first end token."""
    tokens, (end,) = case["response"], case["fields"]["stop_token_ids"]
    return (
        tokens[: tokens.index(end) + 1]
        if end in tokens
        else tokens[: case["fields"]["gen_length"]]
    )


def rows_fed(case: Case, num_passes: int) -> list[list[int]]:
    """A block is fed whole in each of its passes, and once more in front of the next
    block's first pass, unless its last pass saw its final tokens."""
    prompt = len(case["prompt_ids"])
    length = case["fields"]["block_length"]
    rows, kept, block = [], 0, prompt // length * length
    settled = iter(case["settled"])
    for unmasked in case["unmasked_per_step"][:num_passes]:
        if unmasked and min(unmasked) >= block + length:
            kept = block + length if next(settled) else block
            block += length
        rows.append(list(range(kept, block + length)))
        kept = block
    return rows


def assert_as_stated(case: Case, completion: Any) -> None:
    figures, name = completion.diffusion, case["name"]
    assert list(completion.token_ids) == response_of(case), name
    assert (
        figures.unmasked_per_step == case["unmasked_per_step"][: figures.forward_passes]
    ), name
    edited = [[list(edit) for edit in edits] for edits in figures.edited_per_step]
    assert edited == case["edited_per_step"][: figures.forward_passes], name
    assert figures.tokens_edited == sum(map(len, edited)), name
    # The authors go on behind an end token.
    ends_early = case["fields"]["stop_token_ids"][0] in case["response"]
    assert figures.forward_passes == case["num_forward_passes"] or ends_early, name
    assert figures.computed_positions == rows_fed(case, figures.forward_passes), name


def test_the_authors_cases_in_one_batch_and_alone(llm):
    for case, completion in zip(CASES, ask(llm, CASES), strict=True):
        assert_as_stated(case, completion)
    for case in CASES[::6]:
        llm.reset_prefix_cache()
        assert_as_stated(case, ask(llm, [case])[0])


@pytest.mark.parametrize("cache_method", ["block", "none"])
def test_the_same_where_steps_run_ahead(engines, reference_checkpoints, cache_method):
    settings = {
        "max_model_len": 512,
        "page_size": 8,
        "steps_per_dispatch": 6,
        "cache_method": cache_method,
    }
    llm = engines(reference_checkpoints / MODEL, **settings)
    scheduler = scheduler_of(llm)
    with mock.patch.object(scheduler, "schedule", wraps=scheduler.schedule) as schedule:
        for case in CASES:
            llm.reset_prefix_cache()
            (completion,) = ask(llm, [case])
            if cache_method == "block":
                assert_as_stated(case, completion)
            assert list(completion.token_ids) == response_of(case)
    assert schedule.call_count < sum(case["num_forward_passes"] for case in CASES) * 0.8


def test_the_same_where_steps_are_recorded(engines, reference_checkpoints, monkeypatch):
    llm = engines(reference_checkpoints / MODEL, max_model_len=512, page_size=8)
    recorder = record_steps(runner_of(llm), monkeypatch)
    for case, completion in zip(CASES, ask(llm, CASES), strict=True):
        assert_as_stated(case, completion)
    assert recorder.num_replayed > recorder.num_recorded > 0


def test_any_mix_of_requests_in_any_order_with_some_aborted(
    llm, engines, reference_checkpoints
):
    """Requests that edit and that do not, some sampled or constrained, which join and
    leave in any step; the pool holds NaN where nothing was written, and is small enough
    that some lose their pages."""
    draw = random.Random(5)
    plain = [{**case, "fields": {**case["fields"]}} for case in CASES[::3]]
    for case in plain:
        del case["fields"]["edit_threshold"], case["fields"]["max_post_steps"]
    others = in_constraints(
        [(case["prompt_ids"], {**case["fields"]}) for case in CASES[1::2]], 2, 512, 500
    )
    for number, (prompt, fields) in enumerate(others):
        plain.append(
            {
                "prompt_ids": prompt,
                "fields": fields | {"temperature": number % 2, "seed": number},
            }
        )
    cases = draw.sample(CASES + plain, len(CASES) + len(plain))
    expected = [list(ask(llm, [case])[0].token_ids) for case in plain]
    alone = [
        response_of(case) if case in CASES else expected[plain.index(case)]
        for case in cases
    ]
    settings = {
        "max_model_len": 96,
        "page_size": 8,
        "kv_cache_memory_bytes": 1 << 19,
        "enable_prefix_caching": False,
    }
    small = engines(reference_checkpoints / MODEL, **settings)
    prompts = [case["prompt_ids"] for case in cases]
    params = [params_of(case["fields"]) for case in cases]
    joins = [0, *(draw.randrange(40) for _ in cases[1:])]
    scheduler = scheduler_of(small)
    with mock.patch.object(scheduler, "_preempt", wraps=scheduler._preempt) as preempt:
        run = run_in_steps(
            small, prompts, params, joins=joins, after_step=Poison(small)
        )
    assert preempt.call_count > 1
    assert [list(output.outputs[0].token_ids) for output in run.outputs] == alone
    for i in range(6):
        small.llm_engine.add_request(
            str(i), {"prompt_token_ids": prompts[i]}, params[i]
        )
    for i in range(6):
        small.llm_engine.step()
        small.llm_engine.abort_request([str(i)])
    small.llm_engine.step()
    assert_nothing_left(small)


def test_a_finished_block_is_kept_for_requests_that_begin_alike(llm):
    case = max(CASES, key=lambda case: len(case["settled"]))
    (first,) = ask(llm, [case])
    text = [*case["prompt_ids"], *first.token_ids]
    params = params_of(case["fields"] | {"gen_length": 8})
    again = generate(llm, [text], params)[0]
    assert again.num_cached_tokens == len(text) // 16 * 16 > len(case["prompt_ids"])
    llm.reset_prefix_cache()
    fresh = generate(llm, [text], params)[0]
    assert list(again.outputs[0].token_ids) == list(fresh.outputs[0].token_ids)


def writes(
    final: Sequence[int], start: int, unmasked_per_step: list, edited_per_step: list
) -> list[dict[int, int]]:
    """Per pass, the tokens that it writes, by canvas position. ``final``: those of a
    response, which begins at ``start``."""
    all_edits = [edit for edits in edited_per_step for edit in edits]
    first = dict(enumerate(final, start)) | {
        position: before for position, before, _ in reversed(all_edits)
    }
    return [
        {position: first.get(position) for position in filled}
        | {position: token for position, _, token in edits}
        for filled, edits in zip(unmasked_per_step, edited_per_step, strict=True)
    ]


def writes_of(case: Case) -> list[dict[int, int]]:
    return writes(
        case["response"],
        len(case["prompt_ids"]),
        case["unmasked_per_step"],
        case["edited_per_step"],
    )


def test_steps_show_edits_and_nothing_is_sent_before_its_block_ends(llm):
    case = next(case for case in CASES if case["name"] == "token_editing-06")
    params = params_of(case["fields"] | {"stream_granularity": "step"})
    start = len(case["prompt_ids"])
    llm.llm_engine.add_request("one", {"prompt_token_ids": case["prompt_ids"]}, params)
    canvas: dict[int, int] = {}
    end = start + case["fields"]["gen_length"]
    for written in writes_of(case):
        (output,) = llm.llm_engine.step()
        block = output.outputs[0].provisional
        sent = output.outputs[0].token_ids
        canvas |= {
            position: token for position, token in written.items() if position < end
        }
        shown = {
            start + block.start + i: token
            for i, token in enumerate(block.token_ids)
            if not block.masked[i]
        }
        assert shown == {
            position: token
            for position, token in canvas.items()
            if position >= start + block.start
        }
        assert len(sent) == block.sent >= block.start
        assert block.sent == block.start or written == {}, (
            "a settled block is sent with the pass that writes nothing"
        )
    assert list(sent) == response_of(case)
    assert_nothing_left(llm)


def test_order_and_log_probabilities_are_those_of_the_pass_that_wrote_the_final_token(
    llm,
):
    for case, completion in zip(
        CASES, ask(llm, CASES, return_order=True, logprobs=1), strict=True
    ):
        figures, start, committed_at = completion.diffusion, len(case["prompt_ids"]), {}
        for number, written in enumerate(writes_of(case), 1):
            committed_at |= dict.fromkeys(written, number)
        tokens = list(completion.token_ids)
        assert figures.committed_at == [
            committed_at[start + i] for i in range(len(tokens))
        ]
        for i, (token, logprobs, number) in enumerate(
            zip(tokens, completion.logprobs, figures.committed_at, strict=True)
        ):
            assert logprobs[token].logprob == pytest.approx(
                figures.committed_logprobs[i]
            )
            if start + i in {
                position for position, *_ in case["edited_per_step"][number - 1]
            }:
                assert (
                    math.exp(logprobs[token].logprob) > case["fields"]["edit_threshold"]
                )


def test_a_threshold_of_one_and_no_more_steps_is_no_editing(llm):
    plain: dict[str, Any] = {"gen_length": 21, "block_length": 8, "threshold": 0.7}
    params = [
        DiffusionParams(**plain),
        DiffusionParams(**plain, edit_threshold=1.0, max_post_steps=0),
    ]
    first, second = (
        output.outputs[0] for output in generate(llm, [[3, 1, 4]] * 2, params)
    )
    assert (first.token_ids, first.diffusion.forward_passes) == (
        second.token_ids,
        second.diffusion.forward_passes,
    )


@pytest.mark.parametrize(
    ("family", "asked", "said"),
    [
        (
            LLADA,
            {"edit_threshold": 0.9},
            "edit_threshold=0.9: LLaDA attends to the whole canvas: .* are replaced",
        ),
        (
            LLADA2,
            {"max_post_steps": 3},
            "max_post_steps=3 counts steps of token editing; set edit_threshold",
        ),
        (
            LLADA2,
            {"edit_threshold": 1.5},
            "edit_threshold=1.5: .* less than or equal to 1",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(family, asked, said):
    with pytest.raises(InvalidRequestError, match=said):
        resolved(family, gen_length=8, **asked)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_state_of_a_constrained_response_can_be_completed(
    engines, reference_checkpoints, temperature
):
    """Whatever is edited, also where no token would stay; alone as in a batch."""
    llm = engines(reference_checkpoints / MODEL, max_model_len=512, page_size=16)
    draw = random.Random(3)
    requests = []
    for number in range(12):
        fields = {
            "gen_length": draw.randrange(6, 30),
            "block_length": 8,
            "threshold": draw.choice([0.0, 0.3, 0.7]),
            "edit_threshold": draw.choice([0.0, 0.2, 0.5]),
            "max_post_steps": 5,
            "seed": number,
        }
        requests.append(
            ([draw.randrange(480) for _ in range(draw.randrange(1, 20))], fields)
        )
    requests = in_constraints(requests, 1, 512, 500)
    params = [params_of(asked | {"temperature": temperature}) for _, asked in requests]
    outputs = generate(llm, [prompt for prompt, _ in requests], params)
    edited = 0
    for (prompt, asked), output, own in zip(requests, outputs, params, strict=True):
        completion, start = output.outputs[0], len(prompt)
        if "constraint" not in asked:
            continue
        edited += completion.diffusion.tokens_edited
        constraint = Constraint(unpacked(asked["constraint"]), frozenset())
        states, canvas, figures = [], {}, completion.diffusion
        for written in writes(
            completion.token_ids,
            start,
            figures.unmasked_per_step,
            figures.edited_per_step,
        ):
            canvas |= written
            states.append(
                [canvas.get(start + i) for i in range(int(asked["gen_length"]))]
            )
        assert all(constraint.completable(state)[0][0] for state in states)
        assert states[-1] == list(completion.token_ids)
        assert list(generate(llm, [prompt], own)[0].outputs[0].token_ids) == states[-1]
    assert edited > 20
