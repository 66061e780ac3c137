"""``dllm_cache`` beyond the authors' cases: any intervals, any mix of requests, and its pages."""

import math
import random
from typing import Any

import pytest
import torch

from tests.oracles.dllm_cache import DllmCacheModel, LayerCache, plain_dllm_cache, run
from tests.oracles.models import PlainModel
from tests.support import tiny_checkpoints
from tests.support.engines import assert_nothing_left, generate, runner_of, scheduler_of
from tests.support.stepped_engines import Poison, abort_all, run_in_steps

MODELS = ["llada-tiny-a", "dream-tiny-a"]
LENGTHS = [(24, 16, 8, 8), (37, 20, 8, 10), (9, 8, 4, 8), (1, 12, 6, 6)]
"""Prompt, response, block, steps."""
SETTINGS: dict[str, tuple[int, int, float]] = {
    "response due in most steps": (5, 2, 0.25),
    "prompt due alone": (2, 3, 0.5),
    "nothing is updated": (5, 3, 0.0),
    "everything is updated": (6, 4, 1.0),
    "few rows are updated": (7, 5, 0.13),
    "only values are updated": (7, 5, 0.04),
    "due once": (100, 100, 0.3),
}
"""Intervals of prompt and response, share of rows updated."""
SURE = 1e-4
"""A decision between numbers closer than this is rounding's, not the method's."""
SURE_SIMILARITY = 2e-6


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(480) for _ in range(length)]


def options(kp: int, kr: int, ratio: float, **more: Any) -> dict[str, Any]:
    return {"prompt_refresh_interval": kp, "response_refresh_interval": kr, "update_ratio": ratio} | more


@pytest.fixture
def engine(engines, reference_checkpoints):
    def make(model="llada-tiny-a", cache_method="dllm_cache", **cache_options):
        return engines(
            reference_checkpoints / model,
            page_size=8,
            max_model_len=128,
            cache_method=cache_method,
            cache_options=cache_options,
        )

    return make


@pytest.fixture(scope="module")
def plain_models(reference_checkpoints):
    return {name: PlainModel(reference_checkpoints / name) for name in MODELS}


def request(gen_length: int, block_length: int, steps: int, **fields: Any):
    from dllm_engine import DiffusionParams

    return DiffusionParams(
        gen_length=gen_length,
        block_length=block_length,
        steps=steps,
        unmasking="maskgit_plus",
        ignore_eos=True,
        **fields,
    )


def ask(llm, lengths=tuple(LENGTHS), seed=0, **fields):
    """Tokens and figures of a request per entry of ``lengths``."""
    prompts = [prompt(case[0], seed) for case in lengths]
    outputs = generate(llm, prompts, [request(*case[1:], **fields) for case in lengths])
    return [(list(output.outputs[0].token_ids), output.outputs[0].diffusion) for output in outputs]


def settings_of(case: tuple[int, int, int, int], model: PlainModel) -> dict[str, Any]:
    _, gen_length, block_length, steps = case
    return {
        "gen_length": gen_length,
        "block_length": block_length,
        "steps": steps,
        "unmasking": "maskgit_plus" if model.is_dream else "low_confidence",
    }


def assert_as_plain(answers, plains) -> None:
    """Same tokens in the same order, and the same rows updated wherever the plain version was sure of them."""
    compared, compared_rows = 0, 0
    for case, (tokens, figures), plain in zip(LENGTHS, answers, plains, strict=True):
        if plain["closest"] < SURE:
            continue
        assert tokens == plain["tokens"], case
        assert [step for step in figures.unmasked_per_step if step] == [step for step in plain["order"] if step], case
        compared += 1
        if plain["updated"] and plain["closest_similarity"] > SURE_SIMILARITY:
            updated = [[rows for _, rows in sorted(layers.items())] for _, layers in sorted(plain["updated"].items())]
            assert figures.trace["updated_positions"] == updated, case
            compared_rows += 1
    assert compared >= 3, "the cases decide by rounding; choose others"
    assert compared_rows or not any(plain["updated"] for plain in plains), "no case is sure of its rows"


@pytest.mark.parametrize(
    ("name", "first_layer"),
    [(name, True) for name in SETTINGS] + [(name, False) for name in list(SETTINGS)[:2]],
)
@pytest.mark.parametrize("model", MODELS)
def test_engine_decodes_as_the_plain_dllm_cache_does(engine, plain_models, model, name, first_layer):
    chosen = options(*SETTINGS[name])
    plains = [
        plain_dllm_cache(
            plain_models[model],
            prompt(case[0]),
            **settings_of(case, plain_models[model]),
            **chosen,
            first_layer_always=first_layer,
        )
        for case in LENGTHS
    ]
    assert_as_plain(ask(engine(model, refresh_first_layer=first_layer, **chosen)), plains)


@pytest.mark.parametrize("first_layer", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_with_parallel_unmasking_intervals_count_tokens(engine, plain_models, model, first_layer):
    chosen = options(7, 5, 0.25)
    plains = [
        plain_dllm_cache(
            plain_models[model],
            prompt(case[0]),
            **settings_of(case, plain_models[model]),
            **chosen,
            first_layer_always=first_layer,
            threshold=0.2,
        )
        for case in LENGTHS
    ]
    answers = ask(engine(model, refresh_first_layer=first_layer, **chosen), threshold=0.2)
    assert_as_plain(answers, plains)
    sizes = [len(step) for _, figures in answers for step in figures.unmasked_per_step]
    assert min(sizes) == 1, "all pass the threshold: choose another"
    assert max(sizes) > 2, "the threshold lets next to nothing pass: choose another"


@pytest.mark.parametrize("model", MODELS)
def test_a_threshold_that_one_token_passes_changes_no_interval(engine, model):
    llm, shapes = engine(model, **options(5, 3, 0.25)), [(24, 16, 8, 16), (37, 24, 8, 24), (9, 8, 4, 8)]
    if model == "dream-tiny-a":  # Dream's time grid has no run of one token per step
        for _, figures in ask(llm, shapes, threshold=1.0):
            states = figures.refresh_states
            assert states == ["reuse" if number % 5 and number % 3 else "update" for number in range(len(states))]
    else:
        assert ask(llm, shapes, threshold=1.0) == ask(llm, shapes)


class KeyVerified(DllmCacheModel):
    """The plain version with keys and values in each other's place, which verifies keys."""

    def project(self, layer, y):
        q, k, v = super().project(layer, y)
        return q, v, k

    def _attend(self, q, cache, visible):
        return super()._attend(q, LayerCache(cache.v, cache.k, cache.attn, cache.mlp), visible)


@pytest.mark.parametrize("first_layer", [True, False], ids=["first layer always", "first layer too"])
@pytest.mark.parametrize("model", MODELS)
def test_keys_may_be_verified_instead_of_values(engine, plain_models, model, first_layer):
    chosen, plain = options(7, 4, 0.3), plain_models[model]
    plains = [
        run(
            KeyVerified(plain, case[0], **chosen, first_layer_always=first_layer, adapt_beside_prompt=True),
            prompt(case[0]),
            **settings_of(case, plain),
        )
        for case in LENGTHS
    ]
    by_key = ask(engine(model, similarity="key", refresh_first_layer=first_layer, **chosen))
    assert_as_plain(by_key, plains)
    by_value = ask(engine(model, refresh_first_layer=first_layer, **chosen))
    differ = any(
        a[1].trace["updated_positions"] != b[1].trace["updated_positions"]
        for a, b in zip(by_key, by_value, strict=True)
    )
    # A row is as it was in the first layer or it is not: there keys and values tell the same rows.
    assert differ == first_layer


def answers_without_trace(llm, **kwargs):
    return [(tokens, figures.unmasked_per_step) for tokens, figures in ask(llm, **kwargs)]


@pytest.mark.parametrize("first_layer", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_refreshing_everything_in_every_pass_is_no_cache(engine, model, first_layer):
    cached = engine(model, refresh_first_layer=first_layer, **options(1, 1, 0.25))
    assert answers_without_trace(cached, seed=1) == answers_without_trace(engine(model, "none"), seed=1)


@pytest.mark.parametrize("similarity", ["value", "key"])
@pytest.mark.parametrize("model", MODELS)
def test_updating_every_row_is_refreshing_the_response_in_every_pass(engine, model, similarity):
    updated = ask(engine(model, similarity=similarity, **options(3, 7, 1.0)), seed=2)
    refreshed = ask(engine(model, **options(3, 1, 0.0)), seed=2)
    assert [tokens for tokens, _ in updated] == [tokens for tokens, _ in refreshed]
    for (length, gen_length, *_), (_, figures) in zip(LENGTHS, updated, strict=True):
        response = list(range(length, length + gen_length))
        assert {tuple(rows) for layers in figures.trace["updated_positions"] for rows in layers} == {tuple(response)}


@pytest.mark.parametrize("model", MODELS)
def test_intervals_count_passes_over_the_whole_response(engine, model):
    """Not steps of a block: with three blocks of ten steps in all, block borders lie at odd places."""
    length, gen_length = 20, 30
    ((_, figures),) = ask(engine(model, **options(5, 3, 0.2)), lengths=[(length, gen_length, 10, 10)])
    live = length - (model == "dream-tiny-a")
    assert figures.forward_passes == 10
    for number, (state, computed) in enumerate(zip(figures.refresh_states, figures.computed_positions, strict=True)):
        due = number % 5 == 0, number % 3 == 0
        assert state == ("update" if any(due) else "reuse"), number
        assert computed == (None if due[0] else list(range(live, length + gen_length))), number
    # Passes 1, 2, 4, 5, 7, 8; pass 5, in which the prompt is due, updates too.
    updated = figures.trace["updated_positions"]
    assert len(updated) == 6
    assert {len(layers) for layers in updated} == {3}, "the first layer recomputes all rows, and chooses none"
    assert {len(rows) for layers in updated for rows in layers} == {6}


@pytest.mark.parametrize(("first_layer", "layers_of_all"), [(True, 1), (False, 0)])
def test_rows_computed_are_a_mean_over_the_layers(engine, first_layer, layers_of_all):
    ((_, figures),) = ask(engine(refresh_first_layer=first_layer, **options(4, 3, 0.25)), lengths=[(37, 20, 20, 5)])
    # Pass 0: all 57. Pass 3: the response's 20. Passes 1 and 2: 5 of them, and pass 4: the prompt's 37 and 5; the first
    # layer all rows that are fed, or no more.
    other = 4 - layers_of_all
    adaptive = math.ceil((layers_of_all * 20 + other * 5) / 4)
    beside_prompt = math.ceil((layers_of_all * 57 + other * (37 + 5)) / 4)
    assert figures.tokens_computed == 57 + 2 * adaptive + 20 + beside_prompt


# Batches


MIXED = [(24, 16, 8, 16), (37, 12, 12, 12), (50, 20, 10, 20), (9, 8, 4, 8), (24, 16, 8, 16), (30, 16, 16, 16)]
JOINS = [0, 1, 2, 4, 5, 12]


@pytest.mark.parametrize("similarity", ["value", "key"])
@pytest.mark.parametrize("model", MODELS)
def test_requests_in_all_phases_share_a_batch(engine, model, similarity):
    llm = engine(model, similarity=similarity, **options(4, 3, 0.25))
    asked = [prompt(case[0], seed=i) for i, case in enumerate(MIXED)]
    params = [request(*case[1:]) for case in MIXED]
    together = run_in_steps(llm, asked, params, joins=JOINS)
    scopes = [{plan.scope.value for plan in plans} for plans in together.plans]
    assert {"all", "prompt", "response", "active"} in scopes, scopes
    assert {"prompt", "response", "active"} <= set().union(*(s for s in scopes if "all" not in s))
    for i in range(len(MIXED)):
        alone = run_in_steps(llm, asked[i : i + 1], params[i : i + 1])
        assert together.tokens[i] == alone.tokens[0], i
        assert together.figures[i].unmasked_per_step == alone.figures[0].unmasked_per_step, i
        assert together.figures[i].tokens_computed == alone.figures[0].tokens_computed, i
        assert together.figures[i].refresh_states == alone.figures[0].refresh_states, i


@pytest.mark.parametrize("first_layer", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_prompt_states_are_read_by_nobody(engine, model, first_layer):
    chosen = options(4, 3, 0.25, refresh_first_layer=first_layer)
    without, with_ = engine(model, **chosen), engine(model, exclude_prompt_states=False, **chosen)
    excluded, included = ask(without, seed=3), ask(with_, seed=3)
    assert [tokens for tokens, _ in excluded] == [tokens for tokens, _ in included]
    for (_, few), (_, all_) in zip(excluded, included, strict=True):
        assert few.unmasked_per_step == all_.unmasked_per_step
        assert few.trace["updated_positions"] == all_.trace["updated_positions"]
        assert all(rows is None for rows in all_.computed_positions)
    assert any(rows is not None for rows in excluded[0][1].computed_positions)


@pytest.mark.parametrize("model", MODELS)
def test_only_masked_rows_of_the_block_are_projected(engine, model, monkeypatch):
    """Projecting the whole canvas and then taking the rows that are unmasked changes no token."""
    from dllm_engine.model_executor.models.decoder import VocabularyShard

    llm = engine(model, exclude_prompt_states=False, **options(4, 3, 0.25))
    runner = runner_of(llm)
    compute_logits, predict = runner.predictor.compute_logits, runner.denoiser._predict
    case = (50, 20, 8, 10)
    projected: list[int] = []

    def counting(hidden):
        projected.append(len(hidden))
        return compute_logits(hidden)

    monkeypatch.setattr(runner.predictor, "compute_logits", counting)
    some = answers_without_trace(llm, lengths=[case])
    masked, block, candidates = [8, 8, 4], 0, []
    for step in some[0][1]:
        # Dream's first step of a block is about its first position only.
        begins = model == "dream-tiny-a" and masked[block] == [8, 8, 4][block]
        candidates.append(1 if begins else masked[block])
        masked[block] -= len(step)
        block += not masked[block]
    assert projected == candidates

    every: list[int] = []

    def predict_from_all_rows(hidden, group):
        logits, first_token = compute_logits(hidden)
        every.append(len(logits))
        monkeypatch.setattr(runner.predictor, "compute_logits", lambda rows: VocabularyShard(rows, first_token))
        return predict(logits, group)

    monkeypatch.setattr(runner.denoiser, "_predict", predict_from_all_rows)
    assert answers_without_trace(llm, lengths=[case]) == some
    assert set(every) == {case[0] + case[1]}


# Pages


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llada-tiny-a", {}),
        ("llada-tiny-a", {"refresh_first_layer": False}),
        ("dream-tiny-a", {}),
        ("dream-tiny-a", {"exclude_prompt_states": False}),
    ],
    ids=str,
)
def test_nothing_is_read_that_was_not_written(engine, model, more):
    llm = engine(model, **options(4, 3, 0.25), **more)
    asked = [prompt(case[0], seed=i) for i, case in enumerate(MIXED)]
    params = [request(*case[1:]) for case in MIXED]
    expected = run_in_steps(llm, asked, params, joins=JOINS)
    poison = Poison(llm)
    poisoned = run_in_steps(llm, asked, params, joins=JOINS, after_step=poison)
    assert poison.num_given_back > 0
    assert poisoned.tokens == expected.tokens
    for before, after in zip(expected.figures, poisoned.figures, strict=True):
        assert after.trace == before.trace


@pytest.mark.parametrize("model", MODELS)
def test_aborting_in_any_state_leaks_no_page(engine, model):
    llm = engine(model, **options(4, 3, 0.25))
    lengths = [random.Random(i).choice(MIXED) for i in range(50)]
    scopes = abort_all(
        llm, [prompt(case[0], i) for i, case in enumerate(lengths)], [request(*case[1:]) for case in lengths], seed=5
    )
    assert scopes == {"all", "prompt", "response", "active"}


PAGES = [
    # A page of 8 tokens holds 2 · 8 · 4 · 32 = 2,048 numbers, 16 rows of 128. The canvas of 57 tokens takes 8 pages in
    # each of 4 layers; the response's 20 rows 2 pages in 3.
    ("llada-tiny-a", {}, 4 * 8 + 3 * 2),
    ("llada-tiny-a", {"refresh_first_layer": False}, 4 * 8 + 4 * 2),
    ("llada-tiny-a", {"exclude_prompt_states": False}, 4 * 8 + 3 * 4),
    # Half the KV heads, so 8 rows a page, and one row more: the last of the prompt.
    ("dream-tiny-a", {}, 4 * 8 + 3 * 3),
    ("dream-tiny-a", {"refresh_first_layer": False}, 4 * 8 + 4 * 3),
    ("dream-tiny-a", {"exclude_prompt_states": False}, 4 * 8 + 3 * 8),
]


@pytest.mark.parametrize(("model", "more", "expected"), PAGES, ids=str)
def test_a_request_holds_its_canvas_and_its_response_features(engine, model, more, expected):
    llm = engine(model, **options(4, 3, 0.25), **more)
    pages = scheduler_of(llm).pages
    held: list[tuple[int, int]] = []
    run_in_steps(
        llm,
        [prompt(37)],
        [request(20, 10, 10)],
        after_step=lambda: held.append((pages.num_allocated, pages.num_reserved)),
    )
    assert held == [(expected, expected)] * 9 + [(0, 0)]


@pytest.mark.parametrize("model", MODELS)
def test_what_a_batch_holds_is_reserved(engine, model):
    llm = engine(model, **options(4, 3, 0.25))
    pages = scheduler_of(llm).pages
    most = 0

    def check():
        nonlocal most
        most = max(most, pages.num_allocated)
        assert pages.num_allocated <= pages.num_reserved <= pages.num_pages

    run_in_steps(
        llm,
        [prompt(case[0], seed=i) for i, case in enumerate(MIXED)],
        [request(*case[1:]) for case in MIXED],
        joins=JOINS,
        after_step=check,
    )
    assert most > 100


def test_a_page_too_small_for_a_row_of_features_is_refused(engines, tmp_path):
    checkpoint = tiny_checkpoints.write_dream(tmp_path / "one_kv_head", num_key_value_heads=1)
    settings = {"max_model_len": 128, "cache_method": "dllm_cache"}
    # 2 · 1 · 16 numbers a token, 64 a row.
    with pytest.raises(ValueError, match=r"page_size=1 is too small.* the smallest that works is 2"):
        engines(checkpoint, page_size=1, **settings)
    llm = engines(checkpoint, page_size=2, **settings)
    (output,) = generate(llm, [[1, 2, 3]], request(8, 4, 4))
    assert len(output.outputs[0].token_ids) == 8
    assert_nothing_left(llm)


# Settings


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GSAI-ML/LLaDA-8B-Instruct", (50, 7)),
        ("GSAI-ML/LLaDA-1.5", (100, 6)),
        ("Dream-org/Dream-v0-Base-7B", (100, 2)),
        ("Dream-org/Dream-v0-Instruct-7B", (50, 2)),
    ],
)
def test_defaults_are_the_papers_for_each_model(name, expected):
    from dllm_engine.families import DREAM, LLADA
    from dllm_engine.options import EngineOptions

    family = DREAM if "Dream" in name else LLADA
    for chosen in ({}, "paper"):
        cache = EngineOptions(cache_method="dllm_cache", cache_options=chosen).with_paper_settings(name, family).cache
        assert (cache.prompt_refresh_interval, cache.response_refresh_interval) == expected
        assert (cache.update_ratio, cache.similarity) == (0.25, "value")
        assert cache.exclude_prompt_states
        assert cache.refresh_first_layer
    own = EngineOptions(cache_method="dllm_cache", cache_options={"response_refresh_interval": 9})
    cache = own.with_paper_settings(name, family).cache
    assert (cache.prompt_refresh_interval, cache.response_refresh_interval) == (expected[0], 9)


@pytest.mark.parametrize(("model", "expected"), [("llada-tiny-a", (50, 7)), ("dream-tiny-a", (50, 2))])
def test_an_engine_starts_with_the_papers_settings(engine, model, expected):
    llm = engine(model)
    cache = scheduler_of(llm).options.cache
    assert (cache.prompt_refresh_interval, cache.response_refresh_interval) == expected
    ((_, figures),) = ask(llm, lengths=[(12, 16, 16, 16)])
    kr = expected[1]
    assert figures.refresh_states == ["reuse" if number % kr else "update" for number in range(16)]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"prompt_refresh_interval": 0}, "prompt_refresh_interval=0.*greater than or equal to 1"),
        ({"response_refresh_interval": -1}, "response_refresh_interval=-1.*greater than or equal to 1"),
        ({"update_ratio": 1.1}, "update_ratio=1.1.*less than or equal to 1"),
        ({"update_ratio": -0.1}, "update_ratio=-0.1.*greater than or equal to 0"),
        ({"similarity": "query"}, "similarity='query'.*'value' or 'key'"),
        ({"kv_budget": 9}, "unknown cache option 'kv_budget'=9.*prompt_refresh_interval"),
    ],
)
def test_options_out_of_range_are_named(wrong, named):
    from dllm_engine.options import EngineOptions

    with pytest.raises(ValueError, match=named):
        EngineOptions.parse({"cache_method": "dllm_cache", "cache_options": wrong})


def test_retention_cannot_be_lowered_where_nothing_is_evicted(engine):
    llm = engine(**options(4, 3, 0.25))
    with pytest.raises(ValueError, match="'dllm_cache' evicts nothing"):
        generate(llm, [[1, 2, 3]], request(8, 4, 4, retention_ratio=0.5))


def test_unused_features_stay_unwritten(engine):
    """LLaDA's prompt has no features, and what ends the last page is nobody's."""
    llm = engine(**options(4, 3, 0.25))
    runner_of(llm).pages.memory.fill_(torch.nan)
    seen: list[int] = []

    def count():
        from dllm_engine.scheduler.page_layout import PageKind

        (canvas,) = runner_of(llm).canvases.values()
        table = canvas.page_tables[PageKind.FEATURES]
        rows = runner_of(llm).pages.memory.view(-1, 16, 128)[table.long()]
        seen.append(int(rows.isfinite().all(dim=-1).sum()))

    llm.llm_engine.add_request("one", {"prompt_token_ids": prompt(37)}, request(20, 10, 10))
    for _ in range(8):
        llm.llm_engine.step()
        count()
    llm.llm_engine.abort_request(["one"])
    llm.llm_engine.step()
    assert seen == [3 * 20] * 8
    assert_nothing_left(llm)
