"""Several denoising steps per dispatch: the same steps, with the scheduler out of the
way.
"""

from dataclasses import replace
from functools import partial

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.model_executor import model_runner
from dllm_engine.model_executor.unmasking.filling import outcomes_of
from dllm_engine.model_executor.unmasking.statistics import TokenLogprobs
from tests.support.engines import (
    assert_nothing_left,
    generate,
    responses,
    runner_of,
    scheduler_of,
    set_steps_per_dispatch,
)
from tests.support.fake_cuda_graphs import ForbidDeviceSync, record_steps
from tests.support.stepped_engines import run_in_steps

PROMPTS = [[(5 * i * j + i + 1) % 100 for i in range(17 + 3 * j)] for j in range(4)]


asked = partial(DiffusionParams, gen_length=24, block_length=8, ignore_eos=True)


@pytest.fixture
def engine(engines, tiny_llada):
    def make(method, **options):
        return engines(
            tiny_llada,
            cache_method=method,
            cache_options=options,
            page_size=8,
            trace=True,
        )

    return make


def answer(output):
    """What must not depend on the number of steps in a dispatch: the figures and tokens
    of a response, and its log-probabilities."""
    own = output.outputs[0]
    numbers = [
        entry.logprob for position in own.logprobs or () for entry in position.values()
    ]
    figures = replace(own.diffusion, committed_logprobs=[], pages_held=0)
    return (list(own.token_ids), figures), own.diffusion.committed_logprobs + numbers


def count_runs(monkeypatch):
    """A list that grows by the number of steps of each run of steps without a look at
    the device.
    """
    lengths = []

    def counted(filled, *args):
        lengths.append(len(filled))
        return outcomes_of(filled, *args)

    monkeypatch.setattr(model_runner, "outcomes_of", counted)
    return lengths


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((name, {}) for name in ("none", "sparse", "dual", "freecache", "dkv")),
        ("dual", {"refresh": "near"}),
        ("es_dllm", {"indicator": "none"}),
        ("es_dllm", {"keep_schedule": [[1.0, 0.0], [0.5, 0.25]]}),
        (
            "es_dllm",
            {"keep_schedule": [[0.5, 0.0]], "indicator": "key", "retention_ratio": 0.5},
        ),
    ],
)
def test_between_its_steps_no_device_is_waited_for(
    engine, monkeypatch, method, options, recorded
):
    llm = engine(method, **options)
    params = [
        asked(),
        asked(temperature=0.7, seed=3, top_k=5),
        asked(unmasking="entropy"),
        asked(steps=12),
        asked(logit_bias={3: 2.0, 5: -1.0}, min_tokens=9),
        asked(alg_temp=0.3, seed=1, steps=12),
        asked(confidence_eos_eot_inf=True, logits_eos_inf=True),
        asked(logprobs=2, return_order=True),
    ]
    prompts = PROMPTS * 2
    expected = [answer(output) for output in generate(llm, prompts, params)]
    set_steps_per_dispatch(llm, 8, monkeypatch)
    runner = runner_of(llm)
    if recorded and method != "none":
        record_steps(runner, monkeypatch)
    lengths = count_runs(monkeypatch)

    def watched(stage):
        def run(*args):
            with ForbidDeviceSync():
                return stage(*args)

        return run

    for name in ("forward", "predict_and_unmask"):
        stage = getattr(runner.denoiser, name)
        monkeypatch.setattr(runner.denoiser, name, watched(stage))
    for output, (own, logprobs) in zip(
        generate(llm, prompts, params), expected, strict=True
    ):
        assert answer(output) == (own, pytest.approx(logprobs, abs=1e-4))
    assert max(lengths) >= 3
    # Alone, a request runs the steps of a block that reuse its cache in one go.
    lengths.clear()
    generate(llm, PROMPTS[:1], asked(logprobs=1))
    evicts = "retention_ratio" in options
    runs = {
        "none": [8],
        "sparse": [1, 1, 6],
        "dkv": [1, 1, 6],
        "es_dllm": [1, 1, 6] if evicts else [1, 7],
    }
    assert lengths == runs.get(method, [1, 7]) * 3


@pytest.mark.parametrize(
    "method", ["none", "dual", "sparse", "prefix", "dllm_cache", "dkv"]
)
def test_steps_of_a_rule_run_ahead_at_the_pace_of_the_last(engine, monkeypatch, method):
    """Those behind a block's end fill nothing, and are neither reported nor counted."""
    llm = engine(method)
    params = [
        asked(threshold=0.02),
        asked(threshold=0.3),
        asked(threshold=0.05, gen_length=16),
        asked(factor=0.5),
    ]
    expected = generate(llm, PROMPTS, params)
    set_steps_per_dispatch(llm, 8, monkeypatch)
    lengths = count_runs(monkeypatch)
    for prompts, wanted in (
        (PROMPTS, [*range(4)]),
        (PROMPTS[1:2], [1]),
        (PROMPTS[:1], [0]),
    ):
        for output, i in zip(
            generate(llm, prompts, [params[i] for i in wanted]), wanted, strict=True
        ):
            assert output.outputs[0].token_ids == expected[i].outputs[0].token_ids
            figures, single = (o.outputs[0].diffusion for o in (output, expected[i]))
            assert replace(figures, pages_held=0) == replace(
                single, pages_held=0
            )  # of steps that do not come to run
    assert (max(lengths) > 1) == (method in ("none", "dual", "sparse", "prefix"))
    assert_nothing_left(llm)


def test_a_step_is_laid_out_again_if_a_request_that_fails_has_moved_its_canvas(
    engine, monkeypatch
):
    """The first request leaves room in front of the second. The third needs more, takes
    it, and then fails.
    """
    llm = engine("dual")
    params = [asked(gen_length=8), asked(), asked(gen_length=64, logprobs=1)]
    (expected,) = responses(llm, PROMPTS[1:2], asked())
    store = runner_of(llm).store
    for tensor in ("tokens", "masked"):
        monkeypatch.setattr(store, tensor, getattr(store, tensor)[:90].clone())
    store._begin()
    monkeypatch.delattr(TokenLogprobs, "empty")
    starts = set()

    def see():
        starts.update(
            c.start
            for c in store.canvases.values()
            if c.spec.layout.prompt_length == len(PROMPTS[1])
        )

    run = run_in_steps(llm, PROMPTS[:3], params, joins=[0, 0, 12], after_step=see)
    assert len(starts) == 2
    assert run.tokens[1] == expected
    assert not run.tokens[2]
    assert_nothing_left(llm)


def test_requests_that_wait_are_looked_at_after_every_step(engine, monkeypatch):
    llm, ran = engine("dual"), []
    scheduler = scheduler_of(llm)
    update = scheduler.update_from_output

    def counting(scheduled, output):
        ran.append(len(output.reports))
        return update(scheduled, output)

    set_steps_per_dispatch(llm, 5, monkeypatch)
    monkeypatch.setattr(scheduler, "max_num_running", 2)
    monkeypatch.setattr(scheduler, "update_from_output", counting)
    generate(llm, PROMPTS[:3], asked(gen_length=8))
    # Two run while the third waits, then the third alone.
    assert ran == [1] * 8 + [5, 3]
