"""MaskKV in the engine against the plain MaskKV, which was written from the paper alone."""

import itertools
import json
import random
from typing import Any

import pytest

from tests.oracles.maskkv import plain_maskkv
from tests.oracles.models import PlainModel
from tests.support.engines import generate, runner_of, scheduler_of, start_engine
from tests.support.stepped_engines import Poison, abort_all, run_in_steps

PROFILE = [0.3, 0.1, 0.1, 0.5]
REFRESHES = {"prompt_refresh_interval": 6, "response_refresh_interval": 3, "update_ratio": 0.25}
BUDGETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "profile": {"profile": PROFILE},
    "even": {"layer_budget": "uniform", "head_budget": "uniform"},
    "exact": {"profile": PROFILE, "redistribute": True},
    "pooled": {"profile": PROFILE, "pool_kernel_size": 5},
    "first layer": {"refresh_first_layer": True, "profile": PROFILE},
    "response alone": {"prompt_refresh_interval": 100, "response_refresh_interval": 1},
    "prompt alone": {"prompt_refresh_interval": 2, "response_refresh_interval": 5, "update_ratio": 0.0},
    "values alone": {"response_refresh_interval": 5, "update_ratio": 0.04},
}
LENGTHS = [(24, 16, 8, 8), (37, 12, 12, 12), (50, 20, 8, 10), (9, 8, 4, 8)]
"""Prompt, response, block, steps."""
MODELS = ["llada-tiny-a", "dream-tiny-a"]


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed + length)
    return [draw.randrange(480) for _ in range(length)]


@pytest.fixture
def engine(engines, reference_checkpoints):
    def make(model="llada-tiny-a", kv_budget=12, **options):
        options = REFRESHES | {"kv_budget": kv_budget} | options
        return engines(
            reference_checkpoints / model, page_size=8, max_model_len=128, cache_method="maskkv", cache_options=options
        )

    return make


@pytest.fixture(scope="module")
def plain_models(reference_checkpoints):
    return {name: PlainModel(reference_checkpoints / name) for name in MODELS}


def ask(llm, prompts, lengths, **fields):
    from dllm_engine import DiffusionParams

    params = [
        DiffusionParams(gen_length=g, block_length=b, steps=s, unmasking="maskgit_plus", ignore_eos=True, **fields)
        for _, g, b, s in lengths
    ]
    return generate(llm, prompts, params)


def expected(
    model: PlainModel, case: tuple[int, int, int, int], options: dict[str, Any], threshold: float | None = None
):
    """What the plain MaskKV decodes; its names of the options are the engine's but one."""
    options = dict(REFRESHES | options)
    first = options.pop("refresh_first_layer", False)
    length, gen_length, block_length, steps = case
    return plain_maskkv(
        model,
        prompt(length),
        gen_length=gen_length,
        block_length=block_length,
        steps=steps,
        kv_budget=12,
        unmasking="maskgit_plus" if model.is_dream else "low_confidence",
        first_layer_always=first,
        threshold=threshold,
        **options,
    )


@pytest.mark.parametrize(
    ("name", "threshold"), [(name, None) for name in BUDGETS] + [("even", 0.2), ("first layer", 0.2)]
)
@pytest.mark.parametrize("model", MODELS)
def test_engine_decodes_as_the_plain_maskkv_does(engine, plain_models, model, name, threshold):
    options = BUDGETS[name]
    outputs = ask(engine(model, **options), [prompt(case[0]) for case in LENGTHS], LENGTHS, threshold=threshold)
    compared = 0
    for case, output in zip(LENGTHS, outputs, strict=True):
        plain = expected(plain_models[model], case, options, threshold)
        # A decision between numbers this close is rounding's, not the method's.
        if plain["closest"] < 1e-4 or plain["closest_vote"] < 1e-5 or plain["closest_share"] < 1e-4:
            continue
        figures = output.outputs[0].diffusion
        assert list(output.outputs[0].token_ids) == plain["tokens"], case
        assert [step for step in figures.unmasked_per_step if step] == [step for step in plain["order"] if step]
        assert figures.trace["retained_per_head"] == [plain["retained"]]
        updated = [[rows for _, rows in sorted(layers.items())] for _, layers in sorted(plain["updated"].items())]
        assert figures.trace.get("updated_positions", []) == updated
        compared += 1
    assert compared >= 2, "the cases decide by rounding; choose others"


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


def responses(llm, seed=0, **fields):
    """Tokens and order of unmasking of a request per entry of ``LENGTHS``."""
    outputs = ask(llm, [prompt(case[0], seed) for case in LENGTHS], LENGTHS, **fields)
    return [(list(o.outputs[0].token_ids), o.outputs[0].diffusion.unmasked_per_step) for o in outputs]


def retained_per_head(llm, length=37, **fields) -> list[list[list[int]]]:
    """Per layer and KV head, the prompt positions that a request retains."""
    (output,) = generate(llm, [prompt(length)], [request(8, 8, 2, **fields)])
    (retained,) = output.outputs[0].diffusion.trace["retained_per_head"]
    return retained


def counts(retained: list[list[list[int]]]) -> list[list[int]]:
    return [[len(positions) for positions in layer] for layer in retained]


@pytest.fixture
def set_options(monkeypatch):
    """``set_options(llm, ...)``: other cache options for a running engine. Requests carry them, so that an engine of
    its own for each would find nothing more."""
    from dllm_engine.options import EngineOptions

    def set_for_this_test(llm, **cache_options):
        options = EngineOptions(cache_method="maskkv", page_size=8, cache_options=REFRESHES | cache_options)
        monkeypatch.setattr(scheduler_of(llm), "options", options)

    return set_for_this_test


# Batches


MIXED = [(24, 16, 8, 16), (37, 12, 12, 12), (50, 20, 10, 20), (9, 8, 4, 8), (24, 16, 8, 16), (30, 16, 16, 16)]
JOINS = [0, 1, 2, 4, 5, 12]


def mixed_requests():
    return [prompt(case[0], seed=i) for i, case in enumerate(MIXED)], [request(*case[1:]) for case in MIXED]


@pytest.mark.parametrize("model", MODELS)
def test_requests_in_all_phases_share_a_batch(engine, model):
    llm = engine(model, profile=PROFILE, prompt_refresh_interval=4)
    asked, params = mixed_requests()
    together = run_in_steps(llm, asked, params, joins=JOINS)
    scopes = [{plan.scope.value for plan in plans} for plans in together.plans]
    assert {"all", "prompt", "response", "active"} in scopes, scopes
    voting = [{plan.forward == 0 for plan in plans if plan.scope.value == "all"} for plans in together.plans]
    assert {True, False} in voting, "no request refreshes all while another one votes"
    for i in range(len(MIXED)):
        alone = run_in_steps(llm, asked[i : i + 1], params[i : i + 1])
        assert together.tokens[i] == alone.tokens[0], i
        assert together.figures[i].unmasked_per_step == alone.figures[0].unmasked_per_step, i
        assert together.figures[i].trace["retained_per_head"] == alone.figures[0].trace["retained_per_head"], i
        assert together.figures[i].tokens_computed == alone.figures[0].tokens_computed, i


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llada-tiny-a", {}),
        ("llada-tiny-a", {"refresh_first_layer": True}),
        ("dream-tiny-a", {}),
        ("dream-tiny-a", {"exclude_prompt_states": False}),
    ],
    ids=str,
)
def test_nothing_is_read_that_was_not_written(engine, model, more):
    llm = engine(model, profile=PROFILE, prompt_refresh_interval=4, **more)
    asked, params = mixed_requests()
    expected = run_in_steps(llm, asked, params, joins=JOINS)
    poison = Poison(llm)
    poisoned = run_in_steps(llm, asked, params, joins=JOINS, after_step=poison)
    assert poison.num_given_back > 0
    assert poisoned.tokens == expected.tokens
    for before, after in zip(expected.figures, poisoned.figures, strict=True):
        assert after.trace == before.trace


@pytest.mark.parametrize("model", MODELS)
def test_prompt_states_are_read_by_nobody(engine, model):
    excluded = responses(engine(model, profile=PROFILE), seed=3)
    assert excluded == responses(engine(model, profile=PROFILE, exclude_prompt_states=False), seed=3)


@pytest.mark.parametrize("model", MODELS)
def test_aborting_in_any_state_leaks_no_page(engine, model):
    llm = engine(model, profile=PROFILE, prompt_refresh_interval=4)
    lengths = [random.Random(i).choice(MIXED) for i in range(50)]
    scopes = abort_all(
        llm, [prompt(case[0], i) for i, case in enumerate(lengths)], [request(*case[1:]) for case in lengths], seed=5
    )
    assert scopes == {"all", "prompt", "response", "active"}


# Pages


def pages_of(llm, length: int, *fields: int):
    """``(allocated, reserved)`` in the first pass and after every pass, and the figures of a request."""
    pages, runner = scheduler_of(llm).pages, runner_of(llm)
    first: list[tuple[int, int]] = []
    make_layer_pass = runner.make_layer_pass

    def counting(batch, memory):
        first.append((pages.num_allocated, pages.num_reserved))
        return make_layer_pass(batch, memory)

    after: list[tuple[int, int]] = []
    runner.make_layer_pass = counting
    try:
        run = run_in_steps(
            llm,
            [prompt(length)],
            [request(*fields)],
            after_step=lambda: after.append((pages.num_allocated, pages.num_reserved)),
        )
    finally:
        runner.make_layer_pass = make_layer_pass
    return first[0], after, run.figures[0]


def test_pages_of_heads_that_share_a_budget(engine):
    # Base int(0.4 · 12) = 4, pool 8 · 4 = 32; the boundary earns int(0.8 · 32) = 25, so int(4 + 12.5) = 16 a layer, and
    # the middle the 7 left, so int(4 + 3.5) = 7. A page of 8 tokens has 32 slots: of 4 heads · (16 + 12) = 112 slots 4
    # pages, of 4 · (7 + 12) = 76 slots 3. Features: 12 rows of the 16 that a page holds, in each layer.
    first, after, figures = pages_of(engine(profile=PROFILE), 37, 12, 12, 12)
    assert first == (18, 18)
    assert after == [(18, 18)] * 11 + [(0, 0)], "rounding down leaves less than a page"
    retained = [sum(layer) for layer in counts(figures.trace["retained_per_head"][0])]
    assert all(most - 4 < kept <= most for kept, most in zip(retained, [64, 28, 28, 64], strict=True))
    # The same with the first layer recomputed in every pass.
    first, *_ = pages_of(engine(profile=PROFILE, refresh_first_layer=True), 37, 12, 12, 12)
    assert first == (17, 17)


def test_what_the_heads_cannot_use_is_given_back_after_voting(engines, reference_checkpoints):
    llm = engines(
        reference_checkpoints / "llada-tiny-a",
        page_size=2,
        max_model_len=128,
        cache_method="maskkv",
        cache_options=REFRESHES | {"kv_budget": 16, "profile": [0.5, 0, 0, 0.5]},
    )
    first, after, figures = pages_of(llm, 24, 12, 12, 12)
    # Base 6 and a pool of 40 for the boundary alone: 26, 6, 6, 26 tokens a head, but there are only 24. A page has 8
    # slots and room for 4 rows of features: 4 · (24 + 12) = 144 slots and 4 · (6 + 12) = 72; 3 pages of features each.
    assert first == (18 + 9 + 9 + 18 + 4 * 3,) * 2
    kept = counts(figures.trace["retained_per_head"][0])
    assert max(kept[0] + kept[3]) == 24, "no head is at its cap; choose another prompt"
    exact = sum(-(-(sum(layer) + 4 * 12) // 8) for layer in kept) + 4 * 3
    assert exact < 66
    assert after == [(exact, exact)] * 11 + [(0, 0)]


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_never_holds_more_than_it_reserved(engine, model):
    llm = engine(model, profile=PROFILE, prompt_refresh_interval=4)
    pages = scheduler_of(llm).pages
    settled = 0

    def check():
        nonlocal settled
        assert pages.num_allocated <= pages.num_reserved <= pages.num_pages
        settled += 0 < pages.num_allocated == pages.num_reserved

    asked, params = mixed_requests()
    run_in_steps(llm, asked, params, joins=JOINS, after_step=check)
    assert settled > 10


def test_evicting_saves_the_pages_it_should(engine):
    # 100 prompt tokens, 12 kept on average: 112 slots and 76 as above, against 4 · (100 + 12) = 448 slots, 14 pages.
    few, _, _ = pages_of(engine(profile=PROFILE), 100, 12, 12, 2)
    all_, _, _ = pages_of(engine(kv_budget=None), 100, 12, 12, 2)
    assert few == (4 + 3 + 3 + 4 + 4,) * 2
    assert all_ == (4 * 14 + 4,) * 2


# Budgets


@pytest.mark.parametrize(("model", "kv_budget"), [("llada-tiny-a", 50), ("llada-tiny-a", None), ("dream-tiny-a", 50)])
def test_a_budget_of_the_whole_prompt_evicts_nothing(engine, engines, reference_checkpoints, model, kv_budget):
    llm = engine(model, kv_budget=kv_budget, prompt_refresh_interval=1, response_refresh_interval=1)
    none = engines(reference_checkpoints / model, page_size=8, max_model_len=128, cache_method="none")
    assert responses(llm, seed=1) == responses(none, seed=1)
    assert retained_per_head(llm) == [[list(range(37))] * len(layer) for layer in retained_per_head(llm)]


@pytest.mark.parametrize("model", MODELS)
def test_a_budget_below_the_prompt_evicts(engine, model):
    """One token less than the whole prompt, and each head has lost one."""
    llm = engine(model, kv_budget=36, layer_budget="uniform", head_budget="uniform")
    assert {count for layer in counts(retained_per_head(llm)) for count in layer} == {36}


def test_a_request_may_retain_less_than_the_engine(engine):
    even = {"layer_budget": "uniform", "head_budget": "uniform"}
    llm = engine(kv_budget=12, **even)
    assert counts(retained_per_head(llm, 40)) == [[12] * 4] * 4
    assert counts(retained_per_head(llm, 40, retention_ratio=0.5)) == [[12] * 4] * 4, "20 is more than the budget"
    assert counts(retained_per_head(llm, 40, retention_ratio=0.2)) == [[8] * 4] * 4
    assert counts(retained_per_head(llm, 40, retention_ratio=0.0)) == [[0] * 4] * 4
    half = engine(kv_budget=None, retention_ratio=0.5, **even)
    assert counts(retained_per_head(half, 41)) == [[20] * 4] * 4
    first, *_ = pages_of(half, 41, 8, 8, 2)
    assert first == (4 * 4 + 4,) * 2, "4 · (20 + 8) slots"
    with pytest.raises(ValueError, match=r"retention_ratio=0.6"):
        retained_per_head(half, retention_ratio=0.6)


def test_retaining_less_by_request_is_retaining_less_by_engine(engine):
    by_request = responses(engine(kv_budget=None, profile=PROFILE), retention_ratio=0.5)
    assert by_request == responses(engine(kv_budget=None, profile=PROFILE, retention_ratio=0.5))


@pytest.mark.parametrize("kv_budget", [0, 1])
def test_a_budget_of_next_to_nothing(engine, kv_budget):
    llm = engine(kv_budget=kv_budget)
    assert [len(tokens) for tokens, _ in responses(llm)] == [case[1] for case in LENGTHS]
    assert all(sum(layer) <= 4 * kv_budget for layer in counts(retained_per_head(llm)))


@pytest.mark.parametrize("scorer", ["mask_voting", "mean_query", "snapkv", "random"])
@pytest.mark.parametrize("model", MODELS)
def test_every_combination_keeps_to_its_budget(engine, set_options, model, scorer):
    from dllm_engine.model_executor.retention.head_budgets import HEAD_BUDGETS
    from dllm_engine.scheduler.methods.layer_budgets import LAYER_BUDGETS
    from dllm_engine.scheduler.methods.maskkv import MaskKVOptions, prompt_budgets

    llm = engine(model)
    heads = {"llada-tiny-a": 4, "dream-tiny-a": 2}[model]
    for layer_budget, head_budget in itertools.product(LAYER_BUDGETS, HEAD_BUDGETS):
        chosen = {
            "kv_budget": 12,
            "profile": PROFILE,
            "scorer": scorer,
            "layer_budget": layer_budget,
            "head_budget": head_budget,
        }
        for redistribute in (False, True):
            chosen["redistribute"] = redistribute
            set_options(llm, **chosen)
            retained = retained_per_head(llm)
            budgets = prompt_budgets(MaskKVOptions(**chosen), 37, 4)
            assert sum(budgets) == 48 if redistribute else 44 <= sum(budgets) <= 48, chosen
            assert len(set(budgets)) > 1 or layer_budget == "uniform"
            for layer, budget in zip(retained, budgets, strict=True):
                of_heads = [len(positions) for positions in layer]
                assert len(of_heads) == heads
                assert sum(of_heads) == budget * heads if redistribute else sum(of_heads) <= budget * heads, chosen
                assert sum(of_heads) > (budget - 1) * heads, "only rounding loses tokens where no head is at its cap"
                assert len(set(of_heads)) == 1 or head_budget != "uniform"
                for positions in layer:
                    assert positions == sorted(set(positions))
                    assert set(positions) <= set(range(37))


def test_scorers_disagree(engine, set_options):
    llm = engine()
    sets = []
    for scorer in ("mask_voting", "mean_query", "snapkv", "random"):
        set_options(llm, kv_budget=12, layer_budget="uniform", head_budget="uniform", scorer=scorer)
        sets.append(retained_per_head(llm))
    assert all(a != b for a, b in itertools.combinations(sets, 2))


def test_layer_and_head_budgets_follow_profile_and_preference(engine, set_options):
    llm = engine()
    set_options(llm, kv_budget=12, profile=PROFILE, head_budget="uniform")
    assert counts(retained_per_head(llm)) == [[16] * 4, [7] * 4, [7] * 4, [16] * 4]
    set_options(llm, kv_budget=12, layer_budget="pyramid", head_budget="uniform")
    assert counts(retained_per_head(llm)) == [[24] * 4, [16] * 4, [8] * 4, [0] * 4]
    set_options(llm, kv_budget=12, profile=PROFILE, alpha=1.0)
    assert counts(retained_per_head(llm)) == [[16] * 4, [7] * 4, [7] * 4, [16] * 4], "nothing is shared by preference"
    set_options(llm, kv_budget=12, profile=PROFILE, alpha=0.0)
    assert any(len(set(layer)) > 1 for layer in counts(retained_per_head(llm)))


def test_random_retention_follows_the_seed(engine, set_options):
    llm = engine()
    set_options(llm, kv_budget=12, layer_budget="uniform", head_budget="uniform", scorer="random")
    first = retained_per_head(llm, seed=1)
    assert retained_per_head(llm, seed=1) == first
    assert retained_per_head(llm, seed=2) != first
    flat = [tuple(positions) for layer in first for positions in layer]
    assert len(set(flat)) == len(flat), "layers and heads draw their own"


def test_an_observation_window_of_one_asks_the_last_prompt_token(engine, set_options):
    llm = engine()
    sets = []
    for window in (1, 8, 37, 1000):
        set_options(llm, kv_budget=12, scorer="snapkv", observation_window=window)
        sets.append(retained_per_head(llm))
    assert sets[0] != sets[1] != sets[2]
    assert sets[2] == sets[3], "a window longer than the prompt is the prompt"


def test_the_first_layer_may_be_recomputed_in_every_pass(engine):
    length, gen_length = 37, 16
    both = []
    for first_layer in (False, True):
        llm = engine(profile=PROFILE, refresh_first_layer=first_layer)
        (output,) = ask(llm, [prompt(length)], [(length, gen_length, 16, 16)])
        both.append(output.outputs[0].diffusion)
    assert [len(layers) for layers in both[0].trace["updated_positions"]] == [4] * 10
    assert [len(layers) for layers in both[1].trace["updated_positions"]] == [3] * 10
    # Passes 1, 2, 4, 5, …: 4 rows in 4 layers, or 16 in the first and 4 in three.
    assert both[0].tokens_computed == 53 * 3 + 16 * 3 + 10 * 4
    assert both[1].tokens_computed == 53 * 3 + 16 * 3 + 10 * 7


def test_a_refresh_of_the_prompt_alone_updates_nothing(engine):
    llm = engine(prompt_refresh_interval=2, response_refresh_interval=5)
    (output,) = ask(llm, [prompt(37)], [(37, 16, 16, 16)])
    figures = output.outputs[0].diffusion
    adaptive = [number for number in range(16) if number % 2 and number % 5]
    assert len(figures.trace["updated_positions"]) == len(adaptive)
    alone = [number for number in range(16) if number % 2 == 0 and number % 5]
    assert [figures.refresh_states[number] for number in alone] == ["update"] * len(alone)


# Profiles


def write_profile(path, text) -> str:
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return str(path)


def test_a_profile_is_read_from_a_file(engine, tmp_path):
    path = write_profile(tmp_path / "profile.json", {"layer_importance": PROFILE, "model": "any"})
    llm = engine(profile=path)
    assert scheduler_of(llm).options.cache.profile == tuple(PROFILE)
    (tmp_path / "profile.json").unlink()
    assert responses(llm, seed=4) == responses(engine(profile=PROFILE), seed=4)
    assert sum(len(positions) for positions in retained_per_head(llm)[0]) > 12 * 4


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("not JSON", r"profile\.json is not a layer profile \(JSONDecodeError.*make one with `dllm profile`"),
        ("", r"is not a layer profile \(JSONDecodeError"),
        ([0.1] * 4, r"is not a layer profile \(TypeError"),
        ({"importance": [0.1] * 4}, r"is not a layer profile \(KeyError"),
        ({"layer_importance": [0.1, 2.5, 0.1, 0.1]}, "profile.*one number from 0 to 2 per layer"),
        ({"layer_importance": [0.1, -0.1, 0.1, 0.1]}, "profile.*one number from 0 to 2 per layer"),
        ('{"layer_importance": [0.1, NaN, 0.1, 0.1]}', "profile.*one number from 0 to 2 per layer"),
        ({"layer_importance": []}, "profile.*one number from 0 to 2 per layer"),
        ({"layer_importance": ["much"] * 4}, "profile"),
        ({"layer_importance": 0.1}, "profile"),
    ],
)
def test_a_file_that_is_no_profile_is_named(tmp_path, content, named):
    from dllm_engine.options import EngineOptions

    path = write_profile(tmp_path / "profile.json", content)
    with pytest.raises(ValueError, match=named):
        EngineOptions.parse({"cache_method": "maskkv", "cache_options": {"profile": path}})


def test_a_profile_that_is_not_there_is_named(tmp_path):
    from dllm_engine.options import EngineOptions

    with pytest.raises(ValueError, match=r"nowhere\.json is not a layer profile \(FileNotFoundError"):
        EngineOptions.parse({"cache_method": "maskkv", "cache_options": {"profile": str(tmp_path / "nowhere.json")}})


def test_a_profile_of_another_model_is_refused(reference_checkpoints):
    with pytest.raises(ValueError, match="profile has 3 layers, the model has 4"):
        start_engine(
            reference_checkpoints / "llada-tiny-a", cache_method="maskkv", cache_options={"profile": [0.1, 0.2, 0.3]}
        )


@pytest.mark.parametrize(
    ("options", "warnings"),
    [({}, 1), ({"layer_budget": "squeeze"}, 1), ({"layer_budget": "pyramid"}, 0), ({"profile": PROFILE}, 0)],
)
def test_a_missing_profile_is_told_once(engines, reference_checkpoints, monkeypatch, options, warnings):
    from dllm_engine.vllm_hooks import engine_config

    told: list[str] = []
    monkeypatch.setattr(engine_config.logger, "warning", lambda text, *values: told.append(text % values))
    # A length of its own, so that no other test has started this engine.
    llm = engines(
        reference_checkpoints / "llada-tiny-a",
        page_size=8,
        max_model_len=127,
        cache_method="maskkv",
        cache_options=options,
    )
    assert len(responses(llm)) == len(LENGTHS)
    assert len(told) == warnings
    assert all("no layer profile" in line and "dllm profile" in line for line in told)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"kv_budget": -1}, "kv_budget=-1.*greater than or equal to 0"),
        ({"retention_ratio": 1.5}, "retention_ratio=1.5.*less than or equal to 1"),
        ({"scorer": "votes"}, "scorer='votes'.*'mask_voting'"),
        ({"layer_budget": "even"}, "layer_budget='even'.*'uniform'"),
        ({"head_budget": "even"}, "head_budget='even'.*'uniform'"),
        ({"alpha": 1.1}, "alpha=1.1"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"observation_window": 0}, "observation_window=0"),
        ({"budget": 3}, "unknown cache option 'budget'=3.*kv_budget"),
    ],
)
def test_options_out_of_range_are_named(wrong, named):
    from dllm_engine.options import EngineOptions

    with pytest.raises(ValueError, match=named):
        EngineOptions.parse({"cache_method": "maskkv", "cache_options": wrong})
