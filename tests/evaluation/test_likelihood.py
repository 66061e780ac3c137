"""The likelihood bound of masked models, against all of its terms by a plain
implementation.
"""

import itertools
import math

import numpy as np
import pytest

from dllm_engine.evaluation.likelihood import log_likelihoods, weighted_masks
from tests.oracles.models import PlainModel

PROMPT = [5, 6, 7, 8, 9]


def plain_bound(folder, prompt: list[int], continuation: list[int]) -> float:
    """The mean over l, uniform, and over the choices of l positions, of L/l times the
    sum of log-probabilities.
    """
    model, length = PlainModel(folder), len(continuation)
    total = 0.0
    for count in range(1, length + 1):
        choices = list(itertools.combinations(range(length), count))
        for chosen in choices:
            tokens = prompt + continuation
            for position in chosen:
                tokens = [
                    *tokens[: len(prompt) + position],
                    model.mask,
                    *tokens[len(prompt) + position + 1 :],
                ]
            logprobs = model.logits(tokens).log_softmax(-1)
            rows = [
                max(len(prompt) + position - model.is_dream, 0) for position in chosen
            ]
            logprob = sum(
                float(logprobs[row, continuation[i]])
                for row, i in zip(rows, chosen, strict=True)
            )
            total += length / count * logprob / len(choices) / length
    return total


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize(
    ("prompt", "continuation"),
    # Without a prompt the first position predicts itself.
    [(PROMPT, [20]), (PROMPT, [20, 30, 40, 20]), ([], [20, 30])],
)
def test_short_continuations_are_exact(engines, request, family, prompt, continuation):
    checkpoint = request.getfixturevalue(f"tiny_{family}")
    (bound,) = log_likelihoods(
        engines(checkpoint), [(prompt, continuation)], num_samples=15
    )
    assert bound == pytest.approx(
        plain_bound(checkpoint, prompt, continuation), rel=1e-4
    )


def test_canvases_of_other_tokens_and_without_masks(engines, tiny_llada):
    llm = engines(tiny_llada)
    assert list(llm.masked_logprobs([(PROMPT, [])])) == [[]]
    for token in (-1, 10**6):
        with pytest.raises(ValueError, match="a token that is not in the vocabulary"):
            list(llm.masked_logprobs([([*PROMPT, token], [0])]))


@pytest.mark.parametrize(
    ("length", "num_samples"),
    [(0, 1), (1, 1), (3, 7), (3, 6), (7, 127), (7, 126), (5000, 9)],
)
def test_the_number_of_canvases_is_known_before(length, num_samples):
    masks = [*weighted_masks(length, num_samples, np.random.default_rng(0))]
    assert len(masks) == min(2**length - 1, num_samples)


@pytest.mark.parametrize(("length", "num_samples"), [(3, 2), (5, 7), (5, 30)])
def test_sampled_masks_weigh_each_choice_as_the_bound_does(length, num_samples):
    """Expected weight of a choice of l of L positions: 1 / (l · C(L, l))."""
    counts = [
        len(masked) for _, masked in weighted_masks(8, 16, np.random.default_rng(0))
    ]
    assert counts == [count for count in range(1, 9) for _ in range(2)], "spread evenly"
    draws, weights = 4000, {}
    for seed in range(draws):
        for weight, masked in weighted_masks(
            length, num_samples, np.random.default_rng(seed)
        ):
            weights[tuple(masked)] = weights.get(tuple(masked), 0.0) + weight / draws
    assert len(weights) == 2**length - 1
    for positions, weight in weights.items():
        assert weight == pytest.approx(
            1 / (len(positions) * math.comb(length, len(positions))), rel=0.15
        )


def test_an_estimate_depends_on_its_pair_and_seed_alone(engines, tiny_llada):
    llm, long = engines(tiny_llada), list(range(20, 60))
    pairs = [(PROMPT, long), (PROMPT[::-1], [9, 8]), (PROMPT, long[::-1]), (PROMPT, [])]
    together = log_likelihoods(llm, pairs, 5, seed=3)
    assert together[3] == 0.0
    for pair, value in zip(pairs[::-1], together[::-1], strict=True):
        assert log_likelihoods(llm, [pair], 5, seed=3) == pytest.approx(
            [value], rel=1e-5
        )
    assert log_likelihoods(llm, pairs[:1], 5, seed=4) != pytest.approx(
        together[:1], rel=1e-5
    )


def test_canvases_share_forward_passes_up_to_the_token_budget(
    engines, tiny_llada, monkeypatch
):
    llm, batches = engines(tiny_llada), []
    run = llm.collective_rpc
    monkeypatch.setattr(
        llm,
        "collective_rpc",
        lambda *a, **kw: batches.append(kw["args"][1]) or run(*a, **kw),
    )
    monkeypatch.setattr(
        llm.llm_engine.vllm_config.scheduler_config, "max_num_batched_tokens", 300
    )
    canvases = [([1] * n, [0, n - 1]) for n in (100, 120, 90, 250, 10)]
    assert [len(logprobs) for logprobs in llm.masked_logprobs(iter(canvases))] == [
        2
    ] * 5
    assert [[len(sequence) for sequence in batch] for batch in batches] == [
        [100, 120],
        [90],
        [250, 10],
    ]


@pytest.mark.parametrize(
    "canvas", [([], []), ([1] * 257, [1]), ([1, 2], [2]), ([1, 2], [-1])]
)
def test_what_is_no_canvas_is_refused(engines, tiny_llada, canvas):
    with pytest.raises(ValueError, match=r"canvas of \d+ tokens"):
        list(engines(tiny_llada).masked_logprobs([canvas]))
    with pytest.raises(ValueError, match="num_samples=0"):
        log_likelihoods(engines(tiny_llada), [], num_samples=0)


def test_models_whose_attention_depends_on_the_prompts_end_have_none(
    engines, tiny_nemotron_labs
):
    llm = engines(tiny_nemotron_labs)
    with pytest.raises(
        ValueError, match=r"likelihoods of Nemotron.* are not supported"
    ):
        log_likelihoods(llm, [(PROMPT, [20])])
