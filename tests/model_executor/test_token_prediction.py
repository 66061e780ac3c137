"""Predicted tokens and their statistics, whole and by vocabulary shard."""

import threading
from collections import Counter
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from dllm_engine import DiffusionParams
from dllm_engine.model_executor import token_prediction
from dllm_engine.model_executor.models.decoder import VocabularyShard
from dllm_engine.model_executor.token_prediction import Counters, SamplingSettings, TokenPredictor, head_chunks
from dllm_engine.model_executor.unmasking.biased import BiasedRows
from dllm_engine.model_executor.unmasking.constrained import best_of_class
from tests.support.engines import generate, runner_of
from tests.support.fake_cuda_graphs import ForbidDeviceSync
from tests.support.plans import spec_of

VOCAB = 150
MASK = 140
GREEDY = SamplingSettings(0.0, 1.0, 0, False)
ALONE = SimpleNamespace(world_size=1)


def random_logits(rows: int = 9, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def predictor_of(tp_group=ALONE, first: int = 0, end: int = VOCAB) -> TokenPredictor:
    """Takes logits for hidden states, so that a test names the distribution it means."""
    return TokenPredictor(lambda rows: VocabularyShard(rows[:, first:end], first), VOCAB, MASK, tp_group)


def counters(rows: int, seed: int = 5, forward: int = 3) -> Counters:
    return Counters(torch.full((rows,), seed), torch.full((rows,), forward), torch.arange(rows) + 20)


def predict(logits: torch.Tensor, settings: SamplingSettings = GREEDY, *, predictor=None, count=None):
    predictor = predictor if predictor is not None else predictor_of()
    count = count if count is not None else counters(len(logits))
    return predictor.predict(logits, settings, count, with_entropy=True, with_margin=True, num_logprobs=4)


def test_statistics_are_left_out_where_nobody_asks():
    got = predictor_of().predict(random_logits(2), GREEDY, counters(2), with_entropy=False, with_margin=False)
    assert got.negative_entropy is None
    assert got.margin is None
    assert got.logprobs is None


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, SamplingSettings(0.0, 1.0, 0, False)),
        # The most likely token survives the filters, and LLaDA's confidence is of the plain softmax.
        ({"top_p": 0.9, "top_k": 5}, SamplingSettings(0.0, 1.0, 0, False)),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5}, SamplingSettings(0.7, 0.9, 5, False)),
        ({"unmasking": "entropy"}, SamplingSettings(0.0, 1.0, 0, False)),
        ({"unmasking": "entropy", "top_k": 5}, SamplingSettings(0.0, 1.0, 5, True)),
        ({"unmasking": "entropy", "temperature": 0.7}, SamplingSettings(0.7, 1.0, 0, True)),
    ],
    ids=str,
)
def test_settings_that_make_no_difference_are_shared(asked, expected):
    assert SamplingSettings.of(spec_of(**asked)) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (1.0, 5), (0.5, 3)])
def test_mask_token_is_never_predicted(temperature, top_p, top_k):
    logits = random_logits()
    best = logits.argmax(-1)
    logits[:, MASK] = logits.amax(-1) + 1
    got = predict(logits, SamplingSettings(temperature, top_p, top_k, tempered=True))
    assert (got.token != MASK).all()
    if temperature == 0:
        assert torch.equal(got.token, best)


# Sampling


def test_filters_and_draw_of_a_chunk_take_a_launch_each():
    """And the statistics one; a GPU sorts nothing."""
    launched = Counter()

    class Launches(ForbidDeviceSync):
        def call(self, func, args, kwargs):
            name = func.args[0].name if isinstance(func, partial) else func.name().partition(".")[0]
            launched[name] += not getattr(func, "is_view", False)
            return func(*args, **kwargs)

    rows = random_logits(), SamplingSettings(0.7, 0.9, 20, tempered=False), counters(9)
    with Launches():
        predictor_of().predict(*rows, with_entropy=False, with_margin=False)
    of_ours = {"filtered_logits": 1, "gumbel_max": 1, "token_statistics": 1}
    assert +launched == of_ours | {"aten::gather": 1, "aten::add": 1, "aten::sub": 1, "aten::exp": 1}


# Chunks and shards

SETTINGS = [
    GREEDY,
    SamplingSettings(1.0, 1.0, 0, False),
    SamplingSettings(0.7, 1.0, 0, True),
    SamplingSettings(0.0, 0.9, 0, True),
    SamplingSettings(0.0, 1.0, 7, True),
    SamplingSettings(0.8, 0.9, 20, True),
    SamplingSettings(0.8, 0.9, 20, False),
    SamplingSettings(0.0, 1.0, 0, False, LAST := frozenset({3, 10, 148})),
    SamplingSettings(0.8, 0.9, 20, True, LAST),
]


def assert_same(got, expected) -> None:
    assert torch.equal(got.token, expected.token)
    for name in ("probability", "negative_entropy", "margin"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name))
    for name in ("token", "top", "rank"):
        torch.testing.assert_close(getattr(got.logprobs, name), getattr(expected.logprobs, name))
    rows = slice(6, None)  # the first ones hold ties
    assert torch.equal(got.logprobs.top_tokens[rows], expected.logprobs.top_tokens[rows])


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rows_at_once", [0, 1, 2, 4, 9, 100])
def test_chunks_change_nothing_and_bound_the_logits(monkeypatch, settings, rows_at_once):
    logits, predictor, sizes = random_logits(), predictor_of(), []
    whole, compute = predict(logits, settings), predictor.compute_logits
    predictor.compute_logits = lambda rows: sizes.append(len(rows)) or compute(rows)
    monkeypatch.setattr(token_prediction, "MAX_LOGITS_PER_CHUNK", rows_at_once * VOCAB + VOCAB - 1)
    assert_same(predict(logits, settings, predictor=predictor), whole)
    assert max(sizes) == min(max(rows_at_once, 1), 9)


@pytest.mark.parametrize(("vocab_size", "rows"), [(126_464, 512), (152_064, 512), (8192, 2048), (8100, 2048)])
def test_chunks_of_a_gpu_are_whole_tiles(vocab_size, rows):
    chunks = head_chunks(2 * rows + 1, vocab_size, torch.device("cuda"))
    assert chunks == [slice(0, rows), slice(rows, 2 * rows), slice(2 * rows, 3 * rows)]


def on_two_ranks(work):
    """``work(rank, group)`` on two threads with a process group of their own; returns both results."""
    store = torch.distributed.HashStore()
    results: list = [None, None]

    def rank_main(rank: int) -> None:
        try:
            group = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))

            def all_reduce(values: torch.Tensor) -> torch.Tensor:
                values = values.clone()
                group.allreduce([values]).wait()
                return values

            results[rank] = work(rank, SimpleNamespace(world_size=2, device_group=group, all_reduce=all_reduce))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    # A rank that failed makes the other one run into a timeout; its error tells more.
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: "imed out" in str(error)):
        raise error
    return results


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("cut", [128, 64, 145], ids=lambda cut: f"cut at {cut}")
def test_vocabulary_shards_on_two_ranks_equal_the_whole(settings, cut):
    """And exchange per-row numbers alone, unless a filter needs the logits."""
    logits = random_logits(23)
    logits[3, [10, 140, 149]] = 25.0  # a tie across ranks goes to the lowest token, as in an argmax
    logits[4, 148] = 25.0
    logits[5, MASK] = 25.0
    whole, sizes = predict(logits, settings), []

    def work(rank: int, group):
        predictor = predictor_of(group, *((0, cut) if rank == 0 else (cut, VOCAB)))
        gather = predictor._gather
        predictor._gather = lambda values: sizes.append(values.numel()) or gather(values)
        return predict(logits, settings, predictor=predictor)

    for sharded in on_two_ranks(work):
        assert_same(sharded, whole)
    assert settings.filters or max(sizes) <= 4 * 23, "more than the four likeliest tokens that are asked for"


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rows_at_once", [4, 100])
def test_biases_are_added_to_all_but_log_probabilities(monkeypatch, settings, rows_at_once):
    logits, biased = random_logits(9), []
    changed, generator = logits.clone(), torch.Generator().manual_seed(1)
    for first, stop in ((0, 4), (2, 9)):
        rows = torch.zeros(9, dtype=torch.bool)
        rows[first:stop] = True
        tokens = torch.randperm(VOCAB, generator=generator)[:20]
        numbers = torch.randn(20, generator=generator) * 5
        numbers[:3] = -torch.inf
        biased.append(BiasedRows(rows, tokens.numpy(), numbers.numpy()))
        changed[first:stop] = changed[first:stop].index_add(1, tokens, numbers.expand(stop - first, -1))
    expected = predict(changed, settings)
    plain = logits.log_softmax(-1)
    monkeypatch.setattr(token_prediction, "MAX_LOGITS_PER_CHUNK", rows_at_once * VOCAB)

    def found(group=ALONE, first=0, end=VOCAB):
        predictor = predictor_of(group, first, end)
        return predictor.predict(logits, settings, counters(9), True, True, num_logprobs=4, biased=biased)

    for got in (found(), *on_two_ranks(lambda rank, group: found(group, *((0, 100) if rank == 0 else (100, VOCAB))))):
        assert torch.equal(got.token, expected.token)
        for name in ("probability", "negative_entropy", "margin"):
            torch.testing.assert_close(getattr(got, name), getattr(expected, name))
        torch.testing.assert_close(got.logprobs.token, plain.gather(1, got.token[:, None])[:, 0])
        torch.testing.assert_close(got.logprobs.top, plain.topk(4).values)


def test_what_is_least_confident_may_be_predicted_and_counts_nowhere():
    logits = random_logits(5)
    logits[:3, 7] = 30.0
    got = predict(logits, SamplingSettings(0.0, 1.0, 0, False, frozenset({7})))
    others = logits.clone()
    others[:, 7] = -torch.inf
    without = predict(others)
    assert torch.equal(got.token, logits.argmax(-1))
    assert (got.probability[:3] == 0).all()
    for name, least in (("negative_entropy", -1e30), ("margin", -1.0)):
        assert (getattr(got, name)[:3] == least).all()
        assert torch.equal(getattr(got, name)[3:], getattr(without, name)[3:])
    assert torch.equal(got.probability[3:], without.probability[3:])


def test_logprobs_of_given_tokens_are_those_of_the_softmax(monkeypatch):
    monkeypatch.setattr(token_prediction, "MAX_LOGITS_PER_CHUNK", 4 * VOCAB)
    logits = random_logits()
    tokens = torch.tensor([0, 149, MASK, 7, 99, 100, 101, 3, 3])
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(predictor_of().logprobs_of(logits, tokens), expected)

    def work(rank: int, group):
        return predictor_of(group, *((0, 100) if rank == 0 else (100, VOCAB))).logprobs_of(logits, tokens)

    for sharded in on_two_ranks(work):
        torch.testing.assert_close(sharded, expected)


# Logits that are no numbers


@pytest.mark.parametrize(
    "settings",
    [
        GREEDY,
        SamplingSettings(0.0, 0.9, 20, True),
        SamplingSettings(0.7, 1.0, 0, False),
        SamplingSettings(0.7, 0.8, 30, True),
    ],
)
def test_a_probability_is_a_number_just_where_the_logits_are(settings):
    """Minus infinity is one: such a token is never drawn."""
    logits = random_logits(6)
    logits[0, 7] = torch.nan
    logits[1, VOCAB - 1] = torch.inf
    logits[2, :] = torch.nan
    logits[3, 3:100] = -torch.inf
    logits[4, MASK] = torch.inf
    found = predict(logits, settings)
    assert (found.probability < torch.inf).tolist() == [False, False, False, True, False, True]


# Rows through the head


@pytest.mark.parametrize("cache_method", ["none", "dllm_cache"])
@pytest.mark.parametrize(("family", "rows"), [("llada", [8, 6, 4, 2] * 2), ("dream", [1, 7, 5, 3] * 2)])
def test_logits_are_made_for_the_masked_positions_of_the_block_alone(
    engines, request, monkeypatch, family, rows, cache_method
):
    """What may be unmasked in the current block, and nothing at a finished one. (Dream's first step of a block is about
    its first position.)"""
    llm = engines(request.getfixturevalue(f"tiny_{family}"), cache_method=cache_method)
    predictor, found = runner_of(llm).predictor, []
    compute = predictor.compute_logits
    monkeypatch.setattr(predictor, "compute_logits", lambda hidden: found.append(len(hidden)) or compute(hidden))
    generate(llm, [[3, 1, 4, 1, 5]], DiffusionParams(gen_length=16, block_length=8, steps=8, ignore_eos=True))
    assert found == rows


# Constraints


@pytest.mark.parametrize("first", [0, 50])
def test_the_best_token_of_a_class_is_of_that_class_whatever_its_score(first):
    """``first``: of a shard, which holds no token of some class."""
    scores = random_logits(4)[:, first:]
    class_of = (torch.arange(VOCAB) // 50)[first:]
    scores[1] = -torch.inf
    scores[3, 1] = 99
    score, column = best_of_class(scores, class_of, torch.tensor([0, 1, 2, -1]), forbidden_token=1)
    assert class_of[column[1:3]].tolist() == [1, 2]
    assert score[1] > -torch.inf
    assert score[0] == (scores[0, :50].max() if not first else -torch.inf)
    others = scores[3].clone()
    others[1] = -torch.inf
    assert column[3] == others.argmax(), "any class, without the forbidden token"
