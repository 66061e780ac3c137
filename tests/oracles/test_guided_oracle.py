"""The plain Guided Diffusion itself: toy logits, and guides whose answers are known beforehand."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracles.guided import agreeing_prefix, plain_guided, rank, select
from tests.oracles.models import PlainModel

PROMPT = [(31 * i * i + 5 * i + 2) % 480 for i in range(10)]
VOCABULARY = 512


@pytest.fixture(scope="module", params=["llada-tiny-a", "dream-tiny-a"])
def model(request: pytest.FixtureRequest, reference_checkpoints: Path) -> PlainModel:
    torch.set_num_threads(1)
    return PlainModel(reference_checkpoints / request.param)


# Three tokens of vocabulary 4. Best first: row 0 has 2, 1, 0, 3; row 1 has 0, 3, 1, 2; row 2 has 1, 2, 3, 0 with 1 and
# 2 equal.
ROWS = torch.tensor([[1.0, 2.0, 3.0, 0.0], [9.0, 1.0, 0.0, 5.0], [0.0, 4.0, 4.0, 1.0]])


BEST = [2, 0, 1]


def ranks(drafts: list[int]) -> list[float]:
    return [rank(row, draft) for row, draft in zip(ROWS, drafts, strict=False)]


def chosen(drafts: list[int], probabilities: list[float], **settings: Any) -> dict[int, int]:
    return select(drafts, probabilities, ranks(drafts), BEST, **settings)


def test_rank() -> None:
    assert [rank(ROWS[0], token) for token in range(4)] == [2, 1, 0, 3]
    assert [rank(ROWS[2], token) for token in range(4)] == [3, 0, 1, 2], "the lower id goes first"


def test_agreeing_prefix() -> None:
    assert agreeing_prefix(ranks([2, 0, 1]), 1) == 3
    assert agreeing_prefix(ranks([2, 3, 1]), 1) == 1, "what agrees behind a disagreement does not count"
    assert agreeing_prefix(ranks([2, 3, 1]), 2) == 3
    assert agreeing_prefix(ranks([1, 0, 1]), 1) == 0
    assert agreeing_prefix(ranks([1, 0, 3]), 2) == 2
    assert agreeing_prefix(ranks([2, 0, 2]), 1) == 2, "the guide's argmax is the other one of the two"


def test_selection() -> None:
    sure = [0.4, 0.5, 0.9]
    assert chosen([2, 3, 2], sure) == {0: 2}
    assert chosen([2, 3, 2], sure, confidence_threshold=0.5) == {0: 2, 2: 2}, "strictly more than the threshold"
    assert chosen([2, 3, 2], sure, top_k=2) == {0: 2, 1: 3, 2: 2}


def test_fallback() -> None:
    assert chosen([1, 0, 1], [0.4, 0.5, 0.9]) == {0: 2}
    assert chosen([1, 0, 1], [0.4, 0.5, 0.9], fallback="draft") == {0: 1}
    assert chosen([1, 0, 1], [0.4, 0.5, 0.9], confidence_threshold=0.8) == {2: 1}, "something is selected already"


def test_correction_comes_after_the_selection() -> None:
    # With top_k 2 all three are selected; the second is the guide's second choice, and so is the third.
    assert chosen([2, 3, 2], [0.4, 0.5, 0.9], top_k=2, correction=True) == {0: 2, 1: 0, 2: 1}
    # Selected for its probability against the guide, then overwritten.
    sure = chosen([1, 3, 2], [0.4, 0.5, 0.9], confidence_threshold=0.6, correction=True)
    assert sure == {2: 1}
    assert chosen([1, 3, 2], [0.4, 0.5, 0.9], fallback="draft", correction=True) == {0: 2}


def one_hot(tokens: list[int]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float()


def contrary(ids: list[int]) -> torch.Tensor:
    """Agrees with nothing: wants the token after the one it is to predict."""
    return one_hot([(token + 1) % 480 for token in ids[1:]] + [0])


def test_guide_never_predicts_the_mask(model: PlainModel) -> None:
    def masking(ids: list[int]) -> torch.Tensor:
        return 2 * one_hot([model.mask] * len(ids)) + contrary(ids)

    masked, plain = (plain_guided(model, guide, PROMPT, gen_length=4) for guide in (masking, contrary))
    assert (masked.tokens, masked.order) == (plain.tokens, plain.order)
