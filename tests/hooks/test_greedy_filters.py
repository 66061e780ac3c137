"""``top_p`` and ``top_k`` of greedy requests count by every way in: confidences may depend on them."""

import copy
import pickle

import pytest
from vllm.sampling_params import SamplingParams

from dllm_engine import DiffusionParams
from dllm_engine.model_executor.token_prediction import SamplingSettings
from tests.support.engines import generate, scheduler_of
from tests.support.http_app import served

QUESTION = "Tom=48. Ida=07. Give: Ida, Tom"
MESSAGES = [{"role": "user", "content": QUESTION}]
FILTERS = {"top_p": 0.5, "top_k": 7}
GREEDY = {"temperature": 0} | FILTERS
BODIES = {
    "/v1/completions": {"prompt": QUESTION, "max_tokens": 8},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES], "max_tokens": 8},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 8},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
}


@pytest.fixture
def specs(demo, monkeypatch):
    """Requests as the scheduler resolves them. A trip to another process takes vLLM's own fields."""
    specs, scheduler = [], scheduler_of(demo)
    new_state = scheduler._new_state

    def noted(request):
        params = request.sampling_params
        if params.temperature == 0:
            params.top_p, params.top_k = 1.0, 0
        state = new_state(request)
        specs.append(state.spec)
        return state

    monkeypatch.setattr(scheduler, "_new_state", noted)
    return specs


def assert_filtered(specs) -> None:
    assert specs
    assert {(spec.temperature, spec.top_p, spec.top_k) for spec in specs} == {(0, 0.5, 7)}


WAYS = {
    "fields": GREEDY,
    "options": {"temperature": 0, "vllm_xargs": FILTERS},
    "both, of which the options count": {"temperature": 0, "top_p": 0.9, "top_k": 3, "vllm_xargs": FILTERS},
    "nothing, where the server has defaults": {},
}


@pytest.mark.parametrize(
    ("path", "way"),
    [(path, way) for path in BODIES for way in WAYS if path != "/v1/messages" or "vllm_xargs" not in WAYS[way]],
)
def test_over_http(demo, specs, monkeypatch, path, way):
    config = demo.model_config
    if not WAYS[way]:
        monkeypatch.setattr(config, "override_generation_config", config.override_generation_config | FILTERS)
    client = served(demo, "--served-model-name", "demo")
    answer = client.post(path, json={"model": "demo"} | BODIES[path] | WAYS[way])
    assert answer.status_code == 200, answer.text
    assert_filtered(specs)


def test_as_defaults_in_python(demo, specs, monkeypatch):
    config = demo.model_config
    monkeypatch.setattr(config, "override_generation_config", config.override_generation_config | FILTERS)
    monkeypatch.setattr(demo, "default_sampling_params", None)
    demo.generate([QUESTION], use_tqdm=False)
    assert_filtered(specs)


@pytest.mark.parametrize(
    "made",
    [
        lambda: DiffusionParams(gen_length=8, **FILTERS),
        lambda: DiffusionParams(gen_length=8, extra_args=FILTERS),
        lambda: SamplingParams(max_tokens=8, **GREEDY),
        lambda: SamplingParams(max_tokens=8, **GREEDY).clone(),
        lambda: copy.copy(SamplingParams(max_tokens=8, **GREEDY)),
        lambda: pickle.loads(pickle.dumps(SamplingParams(max_tokens=8, **GREEDY))),
        lambda: SamplingParams(max_tokens=8, temperature=0, extra_args=FILTERS),
        lambda: set_later(SamplingParams(max_tokens=8, temperature=0)),
    ],
)
def test_in_python(demo, specs, made):
    params = made()
    generate(demo, [[5, 6]], params)
    params.extra_args = (params.extra_args or {}) | {"block_length": 4}
    generate(demo, [[5, 6]], params)
    assert_filtered(specs)


def set_later(params: SamplingParams) -> SamplingParams:
    params.top_p, params.top_k = 0.5, 7
    return params


def test_neutral_values_change_nothing(client, demo, specs):
    for body in ({}, {"top_p": 1, "top_k": 0}, {"top_k": -1}):
        client.post("/v1/completions", json={"model": "demo", "temperature": 0} | BODIES["/v1/completions"] | body)
    generate(demo, [[5, 6]], SamplingParams(temperature=0, max_tokens=8, top_k=-1))
    assert {(spec.top_p, spec.top_k) for spec in specs} == {(1.0, 0)}


def test_the_answer_is_the_same_by_all_of_them(client, demo):
    """By a policy whose confidences are those of the filtered distribution."""
    policy = {"unmasking": "topk_margin", "steps": 4}
    body = BODIES["/v1/completions"] | {"model": "demo", "prompt": [5, 6, 7], "return_token_ids": True}
    ways = ({"vllm_xargs": policy | {"top_k": 1}}, {"vllm_xargs": policy, "top_k": 1})
    answers = [client.post("/v1/completions", json=body | {"temperature": 0} | way).json() for way in ways]
    tokens = [answer["choices"][0]["token_ids"] for answer in answers]
    for params in (
        DiffusionParams(gen_length=8, top_k=1, **policy),
        SamplingParams(temperature=0, max_tokens=8, top_k=1, extra_args=policy),
    ):
        tokens.append(list(generate(demo, [[5, 6, 7]], params)[0].outputs[0].token_ids))
    assert tokens == [tokens[0]] * 4


def test_families_whose_confidences_do_not_depend_on_them_share_the_head(demo, specs):
    generate(demo, [[5, 6]], SamplingParams(max_tokens=8, **GREEDY))
    assert SamplingSettings.of(specs[0]) == SamplingSettings(0.0, 1.0, 0, False)
