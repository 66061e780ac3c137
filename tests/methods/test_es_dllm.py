"""What ES-dLLM promises beyond its reference cases, and delay_eos with every cache method."""

import random
from itertools import accumulate

import pytest
import torch

from tests.support.engines import assert_nothing_left, generate, runner_of, scheduler_of

PAGE_SIZE = 8
SCHEDULE = [[1, 0], [0.5, 0.25], [0.25, 0.5]]
REQUEST = {"gen_length": 24, "block_length": 8, "ignore_eos": True}
MODELS = ["llada-tiny-a", "dream-tiny-a"]
VARIANTS = {
    "hidden state": {},
    "query": {"indicator": "query"},
    "key": {"indicator": "key"},
    "value": {"indicator": "value"},
    "no indicator": {"indicator": "none"},
    "change alone": {"alpha": 0.0},
    "eviction": {"retention_ratio": 0.4},
    "eviction at once, refreshed prompts": {
        "retention_ratio": 0.4, "update_delay": 0, "prompt_refresh_interval": 5, "indicator": "value",
    },
}  # fmt: skip


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(480) for _ in range(draw.randrange(3, 90))] for _ in range(count)]


@pytest.fixture
def engine(engines, reference_checkpoints):
    def make(model="llada-tiny-a", cache_method="es_dllm", **options):
        if cache_method == "es_dllm":
            options = {"keep_schedule": SCHEDULE, "block_refresh_interval": 4} | options
        return engines(
            reference_checkpoints / model, page_size=PAGE_SIZE, cache_method=cache_method, cache_options=options
        )

    return make


def decoded(llm, asked, **params):
    from dllm_engine import DiffusionParams

    return [output.outputs[0] for output in generate(llm, asked, DiffusionParams(**(REQUEST | params)))]


def responses(llm, asked, **params):
    return [list(output.token_ids) for output in decoded(llm, asked, **params)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_requests_in_all_steps_share_a_batch(engine, model, variant):
    from dllm_engine import DiffusionParams

    llm = engine(model, **VARIANTS[variant])
    asked = prompts(8, seed=1)
    shapes = [(8, 8), (16, 16), (24, 8), (20, 16), (4, 4), (24, 16), (32, 8), (16, 4)]
    params = [
        DiffusionParams(gen_length=n, block_length=b, steps=n // 2, threshold=0.3 if b == 16 else None, ignore_eos=True)
        for n, b in shapes
    ]
    alone = [generate(llm, [prompt], p)[0].outputs[0] for prompt, p in zip(asked, params, strict=True)]
    together = [output.outputs[0] for output in generate(llm, asked, params)]
    for one, same in zip(alone, together, strict=True):
        assert list(one.token_ids) == list(same.token_ids)
        assert one.diffusion.trace == same.diffusion.trace
    assert_nothing_left(llm)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_was_not_written_is_never_read(engine, variant):
    llm = engine("dream-tiny-a", **VARIANTS[variant])
    asked = prompts(4, seed=2)
    expected = responses(llm, asked)
    runner_of(llm).pages.memory.fill_(torch.nan)
    assert responses(llm, asked) == expected


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("threshold", [None, 0.2])
def test_as_many_rows_go_on_as_were_to(engine, model, threshold):
    llm = engine(model)
    for output in decoded(llm, prompts(3, seed=3), threshold=threshold):
        figures = output.diffusion
        selections = iter(figures.selected_positions)
        steps = zip(figures.refresh_states, figures.computed_positions, figures.unmasked_per_step, strict=True)
        unmasked: list[int] = []
        for state, rows, now_unmasked in steps:
            if state == "reuse":
                layers, kept = next(selections), rows
                for fraction, selected in zip((0.5, 0.25), layers, strict=True):
                    count = max(int(fraction * len(rows)), min(len(unmasked) + 2, 8))
                    assert len(selected) == min(count, len(kept))
                    assert set(selected) <= set(kept)
                    kept = selected
                shift = model == "dream-tiny-a"
                assert {p - shift for p in now_unmasked} <= set(kept)
            unmasked = now_unmasked
        assert next(selections, None) is None


def test_rows_that_were_skipped_do_not_count_as_computed(engine):
    (output,) = decoded(engine(), [[1] * 40])
    figures = output.diffusion
    fed = [64 if rows is None else len(rows) for rows in figures.computed_positions]
    selections = iter(figures.selected_positions)
    computed = 0
    for state, num_rows in zip(figures.refresh_states, fed, strict=True):
        # The second and third of four layers drop rows, after they have computed them.
        first, second = map(len, next(selections)) if state == "reuse" else (num_rows, num_rows)
        computed += -(-(2 * num_rows + first + second) // 4)
    assert figures.tokens_computed == computed
    assert figures.tokens_computed < sum(fed)


@pytest.mark.parametrize("model", MODELS)
def test_keeping_every_row_is_refreshing_every_block(engine, model):
    asked = prompts(5, seed=4)
    keeping = responses(engine(model, keep_schedule=[[1, 0]]), asked)
    assert keeping == responses(engine(model, block_refresh_interval=1), asked)


def test_refreshing_everything_is_no_cache(engine):
    asked, whole = prompts(5, seed=5), {"gen_length": 16, "block_length": 16}
    refreshing = responses(engine(prompt_refresh_interval=1), asked, **whole)
    assert refreshing == responses(engine(cache_method="none"), asked, **whole)


def test_a_request_may_retain_less_than_the_engine(engine):
    asked = prompts(1, seed=6)
    (less,) = decoded(engine(retention_ratio=0.5), asked, retention_ratio=0.25)
    outside = len(asked[0]) + 16
    assert {len(layer) for block in less.diffusion.retained_positions for layer in block} == {int(outside * 0.25)}
    assert responses(engine(retention_ratio=0.25), asked) == [list(less.token_ids)]
    with pytest.raises(ValueError, match=r"retention_ratio=0\.75"):
        responses(engine(retention_ratio=0.5), asked, retention_ratio=0.75)


def test_retained_tokens_are_outside_the_rows_of_the_block(engine):
    (output,) = decoded(engine("dream-tiny-a", retention_ratio=0.5), [[5] * 20])
    for block, layers in enumerate(output.diffusion.retained_positions):
        start = 20 + 8 * block - 1
        for positions in layers:
            assert len(positions) == (44 - 8) // 2
            assert positions == sorted(set(positions))
            assert not set(positions) & set(range(start, start + 8))


@pytest.mark.parametrize("variant", VARIANTS)
def test_pages_reserved_are_pages_used(engine, variant):
    from dllm_engine import DiffusionParams

    llm = engine(**VARIANTS[variant])
    scheduler = scheduler_of(llm)
    llm.llm_engine.add_request("one", {"prompt_token_ids": [1] * 41}, DiffusionParams(**REQUEST))
    held = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        held.append((scheduler.pages.num_allocated, scheduler.pages.num_reserved))
    canvas, features = -(-65 // PAGE_SIZE), -(-24 // (2 * PAGE_SIZE))  # a page holds 16 rows of features
    options = VARIANTS[variant]
    expected = 4 * canvas
    if options.get("indicator", "hidden_state") in ("hidden_state", "query"):
        expected += 2 * features
    if "retention_ratio" in options:
        expected += 4 * -(-(int(57 * 0.4) + 8) // PAGE_SIZE)
    assert set(held[:-1]) == {(expected, expected)}
    assert held[-1] == (0, 0)


def test_aborting_in_any_step_leaks_no_page(engine):
    from dllm_engine import DiffusionParams

    llm = engine(retention_ratio=0.5)
    draw = random.Random(7)
    for i, prompt in enumerate(prompts(30, seed=7)):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, DiffusionParams(**REQUEST))
    waiting = list(range(30))
    draw.shuffle(waiting)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        if waiting and draw.random() < 0.7:
            llm.llm_engine.abort_request([str(waiting.pop())])
    assert_nothing_left(llm)


@pytest.mark.parametrize("cache_method", ["none", "prefix", "dual", "sparse", "dkv", "dllm_cache", "es_dllm"])
@pytest.mark.parametrize("model", MODELS)
def test_an_end_token_waits_for_what_comes_before_it(engine, monkeypatch, model, cache_method):
    llm = engine(model, cache_method)
    (prompt,) = prompts(1, seed=9)
    (free,) = decoded(llm, [prompt], delay_eos=cache_method == "none")
    # What the model is quick to predict stands in for its end token.
    end = early_token(free, len(prompt))
    monkeypatch.setattr(runner_of(llm), "end_tokens", torch.tensor([end]))
    (delayed,) = decoded(llm, [prompt], delay_eos=True)
    assert list(delayed.token_ids) != list(free.token_ids) or (
        delayed.diffusion.unmasked_per_step != free.diffusion.unmasked_per_step
    )
    assert len(delayed.token_ids) == 24
    assert not ends_early(delayed, len(prompt), end)


def unmasked_before(output) -> list[set[int]]:
    """The positions unmasked before each step."""
    steps = output.diffusion.unmasked_per_step
    return [set(), *accumulate(map(set, steps), set.union)][: len(steps)]


def ends_early(output, prompt_length: int, end: int) -> bool:
    """Whether the first end tokens were unmasked after a masked position."""
    for before, now in zip(unmasked_before(output), output.diffusion.unmasked_per_step, strict=True):
        ends = [p for p in now if output.token_ids[p - prompt_length] == end]
        if ends:
            return any(p - 1 >= prompt_length and p - 1 not in before for p in ends)
    return False


def early_token(output, prompt_length: int) -> int:
    """A token that would end a response early, were it an end token."""
    for token in output.token_ids:
        if ends_early(output, prompt_length, token):
            return token
    raise AssertionError("every token was unmasked behind its neighbour")
