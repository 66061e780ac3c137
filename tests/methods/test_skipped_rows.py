"""Rows that a method does not compute in every layer are counted by layer."""

import math

import pytest

from tests.support.answers import answers

PROMPT = [7 * i % 100 for i in range(37)]
DLLM_CACHE = {"prompt_refresh_interval": 4, "response_refresh_interval": 3, "update_ratio": 0.25}
MASKKV = {"prompt_refresh_interval": 6, "response_refresh_interval": 3, "update_ratio": 0.25}


@pytest.fixture
def answer(engines, reference_checkpoints):
    """Its model has four layers."""

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


@pytest.mark.parametrize(
    ("method", "lengths", "options", "expected"),
    [
        # Pass 0: all 57. Pass 3: the response's 20. Passes 1 and 2: 5 of them, and pass 4: the prompt's 37 and 5; the
        # first layer all rows that are fed, or no more.
        ("dllm_cache", (20, 20, 5), DLLM_CACHE, 57 + 2 * math.ceil((20 + 3 * 5) / 4) + 20 + math.ceil(183 / 4)),
        # Ten passes of sixteen: 4 rows in 4 layers.
        ("maskkv", (16, 16, 16), MASKKV, 53 * 3 + 16 * 3 + 10 * 4),
        # The first pass runs twice where it measures layers.
        ("maskkv", (16, 16, 1), {"kv_budget": 12}, 2 * 53),
    ],
    ids=str,
)
def test_rows_that_are_not_updated(answer, method, lengths, options, expected):
    assert answer(method, *lengths, **options).tokens_computed == expected


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
