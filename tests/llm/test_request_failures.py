"""A request ends alone with an error where its logits are not finite or its own work
raises an exception.
"""

from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from dllm_engine import DiffusionParams
from dllm_engine.decoding.canvas_layout import CanvasLayout
from dllm_engine.model_executor import step_report
from dllm_engine.model_executor.failures import failure_of
from dllm_engine.model_executor.unmasking import filling
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.scheduler.scheduled_request import ScheduledRequest
from tests.support.engines import (
    EACH_METHOD_WITH_A_MODEL,
    assert_nothing_left,
    generate,
    runner_of,
    scheduler_of,
    set_steps_per_dispatch,
)
from tests.support.plans import WAYS
from tests.support.random_requests import any_text
from tests.support.tiny_checkpoints import MASK, VOCAB_SIZE

BROKEN, EARLIER = 121, 118
"""Tokens whose embeddings are not finite; no answer below contains them."""
BAD = [3, 1, 4, BROKEN, 5, 9]
NEIGHBOURS = [[(7 * i * i + 3 * j) % 90 for i in range(9 + 8 * j)] for j in range(3)]
CONSTRAINT = {"constraint": any_text(VOCAB_SIZE, {MASK, BROKEN, EARLIER}).packed}
NOT_FINITE = "the model produced logits that are NaN or infinite in forward pass {}"
params = partial(DiffusionParams, gen_length=16, block_length=8, ignore_eos=True)


@pytest.fixture
def engine(engines, checkpoint_of):
    """``engine(method, model)``: two tokens have embeddings that are not finite until
    the test ends. (In half precision a product overflows; loading refuses weights that
    are not finite.)"""
    made = []

    def make(cache_method: str, model: str = "tiny_llada", **settings):
        llm = engines(
            checkpoint_of(model), page_size=8, cache_method=cache_method, **settings
        )
        weight = runner_of(llm).model.embedding.weight.data
        made.append((llm, weight, weight[[BROKEN, EARLIER]].clone()))
        weight[BROKEN], weight[EARLIER] = torch.inf, torch.nan
        return llm

    yield make
    for llm, weight, rows in made:
        weight[[BROKEN, EARLIER]] = rows
        assert_nothing_left(llm)


def tokens(output) -> list[int]:
    return list(output.outputs[0].token_ids)


def failed(output) -> int:
    """The forward pass, from 1, whose logits have ended a request with an error;
    asserts that it has.
    """
    completion = output.outputs[0]
    assert completion.finish_reason == "error"
    passes = completion.diffusion.forward_passes + 1
    assert completion.diffusion.error == NOT_FINITE.format(passes)
    return passes


def accepted(llm, ways):
    """Those that the engine does not refuse at admission."""
    found = []
    for way in ways:
        with suppress(InvalidRequestError):
            llm.llm_engine.input_processor.process_inputs(
                "x",
                {"prompt_token_ids": BAD, "type": "token"},
                params(**way),
                ("generate",),
            )
            found.append(way)
    return found


@cache
def answers_alone(llm):
    """What the neighbours are answered one by one, at first."""
    return [tokens(generate(llm, [prompt], params())[0]) for prompt in NEIGHBOURS]


@pytest.mark.parametrize(("method", "model"), EACH_METHOD_WITH_A_MODEL)
def test_logits_that_are_not_finite_end_their_request_and_no_other(
    engine, method, model
):
    llm = engine(method, model)
    ways = accepted(
        llm,
        [
            *WAYS,
            {"unmasking": "maskgit_plus"},
            {"threshold": 0.5, "extra_args": CONSTRAINT},
        ],
    )
    assert len(ways) >= 6
    neighbours = [params() for _ in NEIGHBOURS]
    alone = answers_alone(llm)
    assert not {BROKEN, EARLIER} & {token for answer in alone for token in answer}
    prompts = [[2, EARLIER, 7] if i % 2 else BAD for i in range(len(ways))]
    outputs = generate(
        llm, [*NEIGHBOURS, *prompts], [*neighbours, *(params(**way) for way in ways)]
    )
    assert [tokens(output) for output in outputs[: len(alone)]] == alone
    for output in outputs[len(alone) :]:
        assert failed(output) == 1


@pytest.mark.parametrize(("method", "model"), EACH_METHOD_WITH_A_MODEL)
def test_a_token_that_overflows_when_it_is_read_ends_its_request(
    engine, method, model, monkeypatch
):
    """The first token that the request commits becomes the broken one, when the next
    steps are on the device already."""
    llm = engine(method, model)
    runner = runner_of(llm)
    set_steps_per_dispatch(llm, 4, monkeypatch)
    alone = answers_alone(llm)
    denoiser = type(runner.denoiser)
    predictor = type(runner.rank.predictor)
    fill, predict, seed, bad_rows = denoiser._fill, predictor.predict, 77, []

    def fill_broken(self, hidden, group, plans):
        bad = [
            i for i, canvas in enumerate(group.batch.canvases) if canvas.seed == seed
        ]
        bad_rows[:] = [torch.isin(group.requests, group.requests.new_tensor(bad))]
        return fill(self, hidden, group, plans)

    def predict_broken(self, *args, **kwargs):
        statistics = predict(self, *args, **kwargs)
        statistics.token = statistics.token.masked_fill(bad_rows[0], BROKEN)
        return statistics

    monkeypatch.setattr(denoiser, "_fill", fill_broken)
    monkeypatch.setattr(predictor, "predict", predict_broken)
    outputs = generate(
        llm, [*NEIGHBOURS, [2, 7, 1]], [*(params() for _ in alone), params(seed=seed)]
    )
    assert [tokens(output) for output in outputs[:-1]] == alone
    # Where few rows are recomputed, or a pass fills none, the broken one is read later.
    assert 2 <= failed(outputs[-1]) <= 8


def test_blocks_that_are_finished_are_kept_and_the_failure_is_counted(
    engine, monkeypatch
):
    def num_failed() -> int:
        failures = [
            metric
            for metric in llm.get_metrics()
            if metric.name.endswith("requests_failed")
        ]
        return sum(
            metric.value
            for metric in failures
            if metric.labels["cause"] == "not_finite"
        )

    llm = engine("dual", disable_log_stats=False, cuda_graphs=False)
    before = num_failed()
    compute = runner_of(llm).rank.predictor.compute_logits
    broken_from = 10

    def overflowing(hidden):
        shard = compute(hidden)
        nonlocal broken_from
        broken_from -= 1
        return (
            shard
            if broken_from > 0
            else type(shard)(shard.logits * torch.inf, shard.first_token)
        )

    monkeypatch.setattr(runner_of(llm).rank.predictor, "compute_logits", overflowing)
    (output,) = generate(llm, NEIGHBOURS[:1], params())
    monkeypatch.undo()
    assert failed(output) == 10
    assert tokens(output) == tokens(generate(llm, NEIGHBOURS[:1], params())[0])[:8]
    assert num_failed() == before + 1


@pytest.mark.parametrize(
    ("asked", "is_bound_to_fill", "error"),
    [
        ({}, True, "forward pass 1 unmasked no token, although it has to"),
        # By chance a pass fills nothing until the schedule's last step; here none ever
        # does.
        (
            {"unmasking": "origin", "seed": 1},
            False,
            "still has 8 masked tokens after 24 forward passes",
        ),
    ],
)
def test_passes_that_unmask_nothing_end_their_request(
    engine, monkeypatch, asked, is_bound_to_fill, error
):
    monkeypatch.setattr(
        filling,
        "select",
        lambda rule, confidence, *_: torch.zeros_like(confidence, dtype=torch.bool),
    )
    if not is_bound_to_fill:
        monkeypatch.setattr(step_report, "must_fill", lambda plan, spec: False)
    (output,) = generate(engine("none", "tiny_dream"), NEIGHBOURS[:1], params(**asked))
    assert output.outputs[0].finish_reason == "error"
    assert error in output.outputs[0].diffusion.error


SEED, BAD_LENGTH = 4242, 5
"""Of the request whose work raises."""


def is_bad(*arguments) -> bool:
    """Whether a call is for that request."""
    for argument in arguments:
        if getattr(argument, "seed", None) == SEED:
            return True
        layout = getattr(argument, "layout", None)
        if isinstance(layout, CanvasLayout) and layout.prompt_length == BAD_LENGTH:
            return True
    return False


@pytest.mark.parametrize("steps_per_dispatch", [1, 4])
@pytest.mark.parametrize(
    "where",
    ["canvas", "report", "plan", "pages", "account", "later plan", "finished block"],
)
def test_an_exception_in_the_work_of_one_request_ends_that_request(
    engine, where, steps_per_dispatch, monkeypatch
):
    llm = engine("sparse")
    scheduler, runner = scheduler_of(llm), runner_of(llm)
    set_steps_per_dispatch(llm, steps_per_dispatch, monkeypatch)
    alone, raised = answers_alone(llm), []

    def later(spec, progress) -> bool:
        return is_bad(spec) and progress.num_forwards >= 3

    def breaks(owner, name, is_bad=is_bad):
        """Make a method raise for the bad request."""
        original = getattr(owner, name)

        def broken(*args, **kwargs):
            if is_bad(*args):
                raised.append(name)
                raise RuntimeError(f"broken {where}")
            return original(*args, **kwargs)

        if owner is scheduler.method:
            changed: dict[str, Any] = {name: broken}
            method = replace(owner, **changed)
            monkeypatch.setattr(scheduler, "method", method)
            demand = replace(scheduler.tables.demand, method=method)
            monkeypatch.setattr(scheduler.tables, "demand", demand)
        else:
            monkeypatch.setattr(owner, name, broken)

    attacks: dict[str, list[Any]] = {
        "canvas": [(runner.store, "open")],
        "report": [
            (
                step_report.Reporter,
                "_result",
                lambda r, index, *_: is_bad(r.batch.canvases[index]),
            )
        ],
        "plan": [(scheduler.method, "plan", later)],
        "later plan": [(runner, "plan", later), (scheduler.method, "plan", later)],
        "pages": [(scheduler.method, "pages")],
        "account": [(ScheduledRequest, "advance")],
        "finished block": [(ScheduledRequest, "_output")],
    }
    for attacked in attacks[where]:
        breaks(*attacked)
    prompts = [*NEIGHBOURS, [5] * BAD_LENGTH]
    asked = [*(params() for _ in alone), params(seed=SEED)]
    *outputs, bad = generate(llm, prompts, asked)
    assert raised
    assert bad.outputs[0].finish_reason == "error"
    assert f"broken {where}" in bad.outputs[0].diffusion.error
    assert [tokens(output) for output in outputs] == alone


def test_errors_of_memory_and_devices_are_nobodys():
    for error in (
        MemoryError("no"),
        torch.OutOfMemoryError("no"),
        torch.AcceleratorError("no"),
    ):
        with pytest.raises(type(error)):
            failure_of("a", error)
