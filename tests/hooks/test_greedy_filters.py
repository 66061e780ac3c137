"""``top_p`` and ``top_k`` as options of greedy requests, whose confidences may depend
on them.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from dllm_engine import DiffusionParams
from dllm_engine.model_executor.token_prediction import SamplingSettings
from dllm_engine.vllm_hooks.input_processor import process_checked_inputs
from tests.support.engines import generate, scheduler_of

FILTERS: dict[str, Any] = {"top_p": 0.5, "top_k": 7}


@pytest.fixture
def specs(demo, monkeypatch):
    """Requests as the scheduler resolves them. A trip to another process takes vLLM's
    own fields.
    """
    specs, scheduler = [], scheduler_of(demo)
    new_state = scheduler._new_state

    def noted(request):
        request.sampling_params.top_p, request.sampling_params.top_k = 1.0, 0
        specs.append((state := new_state(request)).spec)
        return state

    monkeypatch.setattr(scheduler, "_new_state", noted)
    return specs


@pytest.mark.parametrize(
    "make",
    [
        lambda: DiffusionParams(gen_length=8, **FILTERS),
        lambda: DiffusionParams(gen_length=8, extra_args=FILTERS),
        lambda: SamplingParams(max_tokens=8, temperature=0, extra_args=FILTERS),
        lambda: SamplingParams(max_tokens=8, temperature=0, **FILTERS),
        lambda: SamplingParams(max_tokens=8, temperature=0, **FILTERS).clone(),
    ],
)
def test_in_python(demo, specs, make):
    generate(demo, [[5, 6]], make())
    assert [
        (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.top_k)
        for spec in specs
    ] == [(0, 0.5, 7)]


@pytest.mark.parametrize(
    "way", [FILTERS, {"vllm_xargs": FILTERS}, {"top_p": 0.9, "vllm_xargs": FILTERS}]
)
def test_over_http(client, demo, specs, way):
    body = {"model": "demo", "prompt": [5, 6], "max_tokens": 8, "temperature": 0} | way
    assert client.post("/v1/completions", json=body).status_code == 200
    assert [
        (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.top_k)
        for spec in specs
    ] == [(0, 0.5, 7)]


def test_families_whose_confidences_do_not_depend_on_them_share_the_head(demo, specs):
    generate(demo, [[5, 6]], DiffusionParams(gen_length=8, **FILTERS))
    assert SamplingSettings.of(specs[0]) == SamplingSettings(0.0, 1.0, 0, False)


def test_requests_of_another_model_lose_them_again(demo):
    given = {"kv_transfer_params": {}}
    params = SamplingParams(
        temperature=0, **FILTERS, extra_args=given, skip_clone=True
    ).clone()
    assert params.extra_args == FILTERS | given
    sent = []
    process_checked_inputs(
        lambda *arguments: sent.append(arguments[3]),
        SimpleNamespace(model_config=SimpleNamespace()),
        "name",
        "prompt",
        params,
    )
    assert [each.extra_args for each in sent] == [given]
