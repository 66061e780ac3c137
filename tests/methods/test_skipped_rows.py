"""Rows that a method does not compute in every layer are counted by layer."""

import math

import pytest

from tests.support.answers import answers

PROMPT = [7 * i % 100 for i in range(37)]


@pytest.fixture
def answer(engines, reference_checkpoints):
    def ask(method: str, gen_length: int, block_length: int, steps: int, **options):
        llm = engines.shared(
            reference_checkpoints / "llada-tiny-a",
            page_size=8,
            max_model_len=128,
            cache_method=method,
            cache_options=options,
        )
        return answers(llm, [(PROMPT, {"gen_length": gen_length, "block_length": block_length, "steps": steps})])[0]

    return ask


@pytest.mark.parametrize(("first_layer", "layers_of_all"), [(True, 1), (False, 0)])
def test_rows_that_dllm_cache_does_not_update(answer, first_layer, layers_of_all):
    refreshes = {"prompt_refresh_interval": 4, "response_refresh_interval": 3, "update_ratio": 0.25}
    found = answer("dllm_cache", 20, 20, 5, refresh_first_layer=first_layer, **refreshes)
    # Pass 0: all 57. Pass 3: the response's 20. Passes 1 and 2: 5 of them, and pass 4: the prompt's 37 and 5; the first
    # layer all rows that are fed, or no more.
    other = 4 - layers_of_all
    adaptive = math.ceil((layers_of_all * 20 + other * 5) / 4)
    beside_prompt = math.ceil((layers_of_all * 57 + other * (37 + 5)) / 4)
    assert found.tokens_computed == 57 + 2 * adaptive + 20 + beside_prompt


@pytest.mark.parametrize(("first_layer", "of_adaptive_pass"), [(False, 4), (True, 7)])
def test_rows_that_maskkv_does_not_update(answer, first_layer, of_adaptive_pass):
    refreshes = {"prompt_refresh_interval": 6, "response_refresh_interval": 3, "update_ratio": 0.25}
    found = answer("maskkv", 16, 16, 16, refresh_first_layer=first_layer, **refreshes)
    assert [len(layers) for layers in found.traces["updated_positions"]] == [3 if first_layer else 4] * 10
    # Passes 1, 2, 4, 5, …: 4 rows in 4 layers, or 16 in the first and 4 in three.
    assert found.tokens_computed == 53 * 3 + 16 * 3 + 10 * of_adaptive_pass


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, 2),
        ({"layer_budget": "squeeze"}, 2),
        ({"layer_budget": "uniform"}, 1),
    ],
    ids=str,
)
def test_the_first_pass_of_maskkv_runs_twice_where_it_measures_layers(answer, options, passes):
    found = answer("maskkv", 16, 16, 1, kv_budget=12, **options)
    assert found.tokens_computed == passes * 53


def test_rows_that_es_dllm_drops(answer):
    schedule = [[1, 0], [0.5, 0.25], [0.25, 0.5]]
    found = answer("es_dllm", 24, 8, 24, keep_schedule=schedule, block_refresh_interval=4)
    selections, computed = iter(found.traces["selected_positions"]), 0
    for state, rows in zip(found.traces["refresh_states"], found.computed, strict=True):
        # The second and third of four layers drop rows, after they have computed them.
        first, second = map(len, next(selections)) if state == "reuse" else (len(rows), len(rows))
        computed += math.ceil((2 * len(rows) + first + second) / 4)
    assert found.tokens_computed == computed
    assert found.tokens_computed < sum(map(len, found.computed))
