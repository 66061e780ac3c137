"""``delay_eos`` with every cache method: an end token waits for what comes before it."""

from itertools import accumulate

import pytest
import torch

from tests.support.answers import Answer, answers
from tests.support.engines import EACH_METHOD_WITH_A_FAMILY, runner_of

PROMPT = [(11 * i * i + 5 * i) % 480 for i in range(41)]
ASKED = {"gen_length": 24, "block_length": 8}


def ends_early(answer: Answer, end: int) -> bool:
    """Whether the first end tokens were unmasked after a masked position."""
    start = len(PROMPT)
    for before, now in zip(accumulate(map(set, answer.order), set.union, initial=set()), answer.order, strict=False):
        if ends := [p for p in now if answer.tokens[p - start] == end]:
            return any(p - 1 >= start and p - 1 not in before for p in ends)
    return False


@pytest.mark.parametrize(("method", "family"), EACH_METHOD_WITH_A_FAMILY)
def test_an_end_token_waits_for_what_comes_before_it(engines, reference_checkpoints, monkeypatch, method, family):
    model = reference_checkpoints / f"{family.lower()}-tiny-a"
    llm = engines.shared(model, page_size=8, max_model_len=128, cache_method=method)
    (free,) = answers(llm, [(PROMPT, ASKED)])
    # What the model is quick to predict stands in for its end token.
    end = next(token for token in free.tokens if ends_early(free, token))
    monkeypatch.setattr(runner_of(llm).denoiser, "end_tokens", torch.tensor([end]))
    (delayed,) = answers(llm, [(PROMPT, ASKED | {"delay_eos": True})])
    assert (delayed.tokens, delayed.order) != (free.tokens, free.order)
    assert not ends_early(delayed, end)
