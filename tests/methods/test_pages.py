"""What each cache method holds in pages: what is reserved for a request is used, and
given back.
"""

import math
from itertools import groupby
from typing import Any

import pytest

from dllm_engine import DiffusionParams
from tests.support import tiny_checkpoints
from tests.support.answers import answers
from tests.support.engines import generate, responses, runner_of, scheduler_of
from tests.support.stepped_engines import run_in_steps

PROMPT = [7 * i % 100 for i in range(37)]
REFRESHES: dict[str, Any] = {
    "prompt_refresh_interval": 6,
    "response_refresh_interval": 3,
    "update_ratio": 0.25,
}
SKIPS: dict[str, Any] = {
    "keep_schedule": [[1, 0], [0.5, 0.25], [0.25, 0.5]],
    "block_refresh_interval": 4,
}
LLADA, DREAM = "llada-tiny-a", "dream-tiny-a"
"""Four layers each. A page of 8 tokens holds 4 heads of 32 and 16 rows of features, for
Dream 2 heads and 8 rows.
"""


def params_of(gen_length: int, block_length: int, **asked: Any):
    return DiffusionParams(
        gen_length=gen_length, block_length=block_length, ignore_eos=True, **asked
    )


@pytest.fixture
def engine(engines, reference_checkpoints):
    def make(method: str, model: str = LLADA, page_size: int = 8, **options: Any):
        settings = {
            "page_size": page_size,
            "max_model_len": 128,
            "cache_method": method,
        }
        return engines.shared(
            reference_checkpoints / model, cache_options=options, **settings
        )

    return make


def held(llm, prompt_length: int, *lengths: int) -> list[tuple[tuple[int, int], int]]:
    """Pages (allocated, reserved) of one request after each step, and for how many
    steps it was so.
    """
    pages = scheduler_of(llm).pages
    after = []
    prompt = [7 * i % 100 for i in range(prompt_length)]
    run_in_steps(
        llm,
        [prompt],
        [params_of(*lengths)],
        after_step=lambda: after.append((pages.num_allocated, pages.num_reserved)),
    )
    return [(pages, len(list(steps))) for pages, steps in groupby(after)]


CANVAS_65 = 4 * 9


@pytest.mark.parametrize(
    ("method", "model", "options", "lengths", "expected"),
    [
        # int(88 · 0.25) = 22 tokens outside the block, from the second step on.
        (
            "sparse",
            LLADA,
            {"retention_ratio": 0.25},
            (88, 32, 32),
            [((0, 12), 1), ((12, 12), 30)],
        ),
        # The prompt and the blocks before the running one: 16, 24 and 32 tokens.
        (
            "prefix",
            LLADA,
            {},
            (16, 24, 8),
            [((8, 16), 8), ((12, 16), 8), ((16, 16), 7)],
        ),
        # A finished block comes in the next one's first step: 17, 33 and 49 tokens.
        (
            "freecache",
            LLADA,
            {},
            (17, 48, 16),
            [((12, 28), 16), ((20, 28), 16), ((28, 28), 15)],
        ),
        # The whole canvas from the first step on.
        ("dkv", LLADA, {}, (17, 24, 8), [((24, 24), 23)]),
        # The canvas of 57 tokens takes 8 pages in each of 4 layers; the response's 20
        # rows 2 pages in 3.
        ("dllm_cache", LLADA, {}, (37, 20, 10), [((4 * 8 + 3 * 2,) * 2, 19)]),
        (
            "dllm_cache",
            LLADA,
            {"refresh_first_layer": False},
            (37, 20, 10),
            [((4 * 8 + 4 * 2,) * 2, 19)],
        ),
        (
            "dllm_cache",
            LLADA,
            {"exclude_prompt_states": False},
            (37, 20, 10),
            [((4 * 8 + 3 * 4,) * 2, 19)],
        ),
        # One row more: the last of the prompt.
        ("dllm_cache", DREAM, {}, (37, 20, 10), [((4 * 8 + 3 * 3,) * 2, 19)]),
        (
            "dllm_cache",
            DREAM,
            {"refresh_first_layer": False},
            (37, 20, 10),
            [((4 * 8 + 4 * 3,) * 2, 19)],
        ),
        (
            "dllm_cache",
            DREAM,
            {"exclude_prompt_states": False},
            (37, 20, 10),
            [((4 * 8 + 3 * 8,) * 2, 19)],
        ),
        # The canvas, features of 24 rows in the two layers that drop rows, and 30
        # retained tokens in each layer.
        ("es_dllm", LLADA, {}, (41, 24, 8), [((CANVAS_65 + 2 * 2,) * 2, 23)]),
        (
            "es_dllm",
            LLADA,
            {"indicator": "query"},
            (41, 24, 8),
            [((CANVAS_65 + 2 * 2,) * 2, 23)],
        ),
        ("es_dllm", LLADA, {"indicator": "key"}, (41, 24, 8), [((CANVAS_65,) * 2, 23)]),
        (
            "es_dllm",
            LLADA,
            {"indicator": "none"},
            (41, 24, 8),
            [((CANVAS_65,) * 2, 23)],
        ),
        (
            "es_dllm",
            LLADA,
            {"retention_ratio": 0.4},
            (41, 24, 8),
            [((CANVAS_65 + 2 * 2 + 4 * 4,) * 2, 23)],
        ),
    ],
    ids=str,
)
def test_pages_of_a_request(engine, method, model, options, lengths, expected):
    base: dict[str, Any] = {"dllm_cache": REFRESHES, "es_dllm": SKIPS}.get(method, {})
    assert held(engine(method, model, **base, **options), *lengths) == [
        *expected,
        ((0, 0), 1),
    ]


@pytest.mark.parametrize(
    "budgets",
    [
        {},
        {"layer_budget": "squeeze"},
        {"scorer": "h2o"},
        {"layer_budget": "pyramid", "head_budget": "adaptive", "scorer": "mean_query"},
    ],
    ids=str,
)
def test_layers_and_heads_share_what_a_request_reserves(engine, monkeypatch, budgets):
    llm = engine("maskkv", **REFRESHES | {"kv_budget": 12} | budgets)
    pages, runner, at_first = scheduler_of(llm).pages, runner_of(llm), []
    make_layer_pass = runner.layer_pass_class.of

    def counting(batch, memory):
        at_first.append((pages.num_allocated, pages.num_reserved))
        return make_layer_pass(batch, memory)

    monkeypatch.setattr(runner.layer_pass_class, "of", counting)
    after = held(llm, 37, 12, 12)
    (output,) = generate(llm, [PROMPT], params_of(12, 12))
    (retained,) = output.outputs[0].diffusion.trace["retained_per_head"]
    kept = [[len(positions) for positions in layer] for layer in retained]
    # 12 tokens of the prompt and 12 of the response, of 4 heads in 4 layers, in pages
    # of 32 slots, however layers share them. Features: 12 rows of the 16 that a page
    # holds, in each layer.
    assert at_first[0] == (4 * 4 * 24 // 32 + 4,) * 2
    slots = sum(map(sum, kept)) + 4 * 4 * 12
    assert after == [((-(-slots // 32) + 4,) * 2, 11), ((0, 0), 1)]
    assert slots > 4 * 4 * (12 + 12 - 2), "only rounding loses tokens"
    assert len({sum(layer) for layer in kept}) > 1, "layers are alike"


def test_a_request_the_pool_can_never_hold_is_refused_with_the_numbers(
    engines, tiny_llada, monkeypatch
):
    # The pool fits one request of max_model_len at the ratio, so a shorter canvas never
    # hits this; shrink it by hand.
    llm = engines(tiny_llada, page_size=8, cache_method="dual", max_num_seqs=7)
    monkeypatch.setattr(llm.llm_engine.vllm_config.cache_config, "num_gpu_blocks", 5)
    with pytest.raises(
        ValueError,
        match=r"needs \d+ pages .* has 4; shorten prompt or response, or raise kv",
    ):
        generate(llm, [[1] * 100], params_of(40, 8))


# Rows that a method does not compute in every layer are counted by layer


DLLM_CACHE = {
    "prompt_refresh_interval": 4,
    "response_refresh_interval": 3,
    "update_ratio": 0.25,
}


@pytest.mark.parametrize(
    ("method", "lengths", "options", "expected"),
    [
        # Pass 0: all 57. Pass 3: the response's 20. Passes 1 and 2: 5 of them, and pass
        # 4: the prompt's 37 and 5; the first layer all rows that are fed, or no more.
        (
            "dllm_cache",
            (20, 20, 5),
            DLLM_CACHE,
            57 + 2 * math.ceil((20 + 3 * 5) / 4) + 20 + math.ceil(183 / 4),
        ),
        # Ten passes of sixteen: 4 rows in 4 layers.
        ("maskkv", (16, 16, 16), REFRESHES, 53 * 3 + 16 * 3 + 10 * 4),
        # The first pass runs twice where it measures layers.
        ("maskkv", (16, 16, 1), {"kv_budget": 12}, 2 * 53),
    ],
    ids=str,
)
def test_rows_that_are_not_updated(engine, method, lengths, options, expected):
    asked = dict(zip(("gen_length", "block_length", "steps"), lengths, strict=True))
    (answer,) = answers(engine(method, **options), [(PROMPT, asked)])
    assert answer.tokens_computed == expected


def test_rows_that_es_dllm_drops(engine):
    (found,) = answers(
        engine("es_dllm", **SKIPS), [(PROMPT, {"gen_length": 24, "block_length": 8})]
    )
    selections = iter(found.traces["selected_positions"])
    computed = 0
    for state, rows in zip(found.traces["refresh_states"], found.computed, strict=True):
        # The second and third of four layers drop rows, after they have computed them.
        first, second = (
            map(len, next(selections)) if state == "reuse" else (len(rows), len(rows))
        )
        computed += math.ceil((2 * len(rows) + first + second) / 4)
    assert found.tokens_computed == computed
    assert found.tokens_computed < sum(map(len, found.computed))


@pytest.mark.parametrize(
    ("method", "family", "depth"),
    [
        ("dllm_cache", "llada", "n_layers"),
        ("freecache", "llada", "n_layers"),
        ("freecache", "dream", "num_hidden_layers"),
    ],
)
def test_a_model_of_one_layer_answers_as_without_a_cache(
    engines, tmp_path, method, family, depth
):
    """Its keys and values depend on nothing but their own token. With ``dllm_cache`` it
    needs no page of features.
    """
    sizes: dict[str, Any] = {depth: 1}
    model = tiny_checkpoints.write(family, tmp_path, **sizes)
    prompts = [[7 * i % 100 for i in range(1, length)] for length in (14, 6)]
    params = params_of(24, 8, steps=12)
    cached, plain = (
        responses(engines(model, cache_method=each), prompts, params)
        for each in (method, "none")
    )
    assert cached == plain


EVEN = {"kv_budget": 12, "layer_budget": "uniform", "head_budget": "uniform"}


@pytest.mark.parametrize(
    ("method", "options", "traced"),
    [
        ("sparse", {"retention_ratio": 0.4}, "retained_positions"),
        ("maskkv", EVEN, "retained_per_head"),
    ],
)
def test_what_is_retained_at_random_follows_the_seed(engine, method, options, traced):
    """``test_random_requests.py`` compares the other scorers with plain ones."""
    requests = [
        (PROMPT, {"gen_length": 24, "block_length": 8, "seed": seed})
        for seed in (1, 1, 2)
    ]
    first, again, other = (
        answer.traces[traced]
        for answer in answers(engine(method, scorer="random", **options), requests)
    )
    assert first == again != other
    if method == "maskkv":
        flat = [tuple(positions) for layer in first[0] for positions in layer]
        assert len(set(flat)) == len(flat), "layers and heads draw their own"
