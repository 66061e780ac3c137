"""The plain Guided Diffusion itself: toy logits, and guides whose answers are known beforehand."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracles.guided import Guide, agreeing_prefix, plain_guided, rank, select
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
    with pytest.raises(ValueError):
        chosen([1], [0.4], fallback="none")


def test_correction_comes_after_the_selection() -> None:
    # With top_k 2 all three are selected; the second is the guide's second choice, and so is the third.
    assert chosen([2, 3, 2], [0.4, 0.5, 0.9], top_k=2, correction=True) == {0: 2, 1: 0, 2: 1}
    # Selected for its probability against the guide, then overwritten.
    sure = chosen([1, 3, 2], [0.4, 0.5, 0.9], confidence_threshold=0.6, correction=True)
    assert sure == {2: 1}
    assert chosen([1, 3, 2], [0.4, 0.5, 0.9], fallback="draft", correction=True) == {0: 2}


def one_hot(tokens: list[int]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float()


def echo(ids: list[int]) -> torch.Tensor:
    """Agrees with everything: no causal model, it reads the token that it is to predict."""
    return one_hot([*ids[1:], 0])


def contrary(ids: list[int]) -> torch.Tensor:
    """Agrees with nothing: wants the token after the one it is to predict."""
    return one_hot([(token + 1) % 480 for token in ids[1:]] + [0])


def greedy_draft(model: PlainModel, canvas: list[int]) -> list[int]:
    return [
        int(row.argmax()) if token == model.mask else token
        for row, token in zip(model.predictions(canvas), canvas, strict=True)
    ]


def test_causal_oracle_unmasks_everything_at_once(model: PlainModel) -> None:
    draft = greedy_draft(model, PROMPT + [model.mask] * 16)

    def oracle(ids: list[int]) -> torch.Tensor:
        """Knows the text by heart, whatever it is shown."""
        return one_hot([*draft[1:], 0])[: len(ids)]

    out = plain_guided(model, oracle, PROMPT, gen_length=16)
    assert PROMPT + out.tokens == draft
    assert out.order == [list(range(10, 26))]


@pytest.mark.parametrize(("speculation_length", "block_length"), [(5, None), (32, 8), (5, 8), (1, 8)])
def test_agreeing_guide_unmasks_whole_windows(
    model: PlainModel, speculation_length: int, block_length: int | None
) -> None:
    out = plain_guided(
        model, echo, PROMPT, gen_length=20, speculation_length=speculation_length, block_length=block_length
    )
    starts = range(10, 30, block_length or 20)
    expected = [
        list(range(first, min(first + speculation_length, start + (block_length or 20), 30)))
        for start in starts
        for first in range(start, min(start + (block_length or 20), 30), speculation_length)
    ]
    assert out.order == expected
    canvas = PROMPT + [model.mask] * 20
    for window in expected:
        draft = greedy_draft(model, canvas)
        for position in window:
            canvas[position] = draft[position]
    assert out.tokens == canvas[10:]


@pytest.mark.parametrize("fallback", ["guide", "draft"])
def test_useless_guide_yields_one_token_per_step(model: PlainModel, fallback: str) -> None:
    out = plain_guided(model, contrary, PROMPT, gen_length=12, speculation_length=4, fallback=fallback)
    assert out.order == [[position] for position in range(10, 22)]
    canvas = PROMPT + [model.mask] * 12
    for position in range(10, 22):
        token = greedy_draft(model, canvas)[position]
        canvas[position] = token if fallback == "draft" else (token + 1) % 480
    assert out.tokens == canvas[10:]


def recorded(guide: Guide) -> tuple[Guide, list[list[int]]]:
    texts: list[list[int]] = []

    def record(ids: list[int]) -> torch.Tensor:
        texts.append(ids)
        return guide(ids)

    return record, texts


def test_guide_sees_decoded_tokens_inside_the_window(model: PlainModel) -> None:
    guide, texts = recorded(contrary)
    settings = {"gen_length": 16, "speculation_length": 6, "confidence_threshold": 0.3}
    out = plain_guided(model, guide, PROMPT, **settings)  # type: ignore[arg-type]
    canvas = PROMPT + [model.mask] * 16
    skipped = 0
    for text, filled in zip(texts, out.order, strict=True):
        masked = [i for i, token in enumerate(canvas) if token == model.mask]
        window, rows = masked[:6], model.predictions(canvas).softmax(-1)
        skipped += window[-1] - window[0] + 1 > len(window)
        draft = greedy_draft(model, canvas)
        assert text == draft[: window[-1] + 1]
        sure = [i for i in window if float(rows[i].max()) > 0.3]
        assert filled == (sure or window[:1])
        for i in filled:
            canvas[i] = draft[i] if sure else (draft[i] + 1) % 480
    assert out.tokens == canvas[10:]
    assert skipped, "some window had a gap"
    assert len(out.order) < 16


def test_correction_leaves_the_text_to_the_guide(model: PlainModel) -> None:
    # Whatever is selected becomes the guide's token, here 7 all along.
    def stubborn(ids: list[int]) -> torch.Tensor:
        return one_hot([7] * len(ids))

    out = plain_guided(model, stubborn, PROMPT, gen_length=12, confidence_threshold=0.2, correction=True)
    assert out.tokens == [7] * 12
    assert len(out.order) < 12


def test_top_k_unmasks_what_is_nearly_right(model: PlainModel) -> None:
    def second_choice(ids: list[int]) -> torch.Tensor:
        return echo(ids) + 2 * contrary(ids)

    assert len(plain_guided(model, second_choice, PROMPT, gen_length=12).order) == 12
    nearly = plain_guided(model, second_choice, PROMPT, gen_length=12, top_k=2)
    assert len(nearly.order) == 1
    assert nearly.tokens == plain_guided(model, echo, PROMPT, gen_length=12).tokens
    corrected = plain_guided(model, second_choice, PROMPT, gen_length=12, top_k=2, correction=True)
    assert corrected.tokens == [(token + 1) % 480 for token in nearly.tokens]


def test_guide_never_predicts_the_mask(model: PlainModel) -> None:
    def masking(ids: list[int]) -> torch.Tensor:
        return 2 * one_hot([model.mask] * len(ids)) + contrary(ids)

    masked, plain = (plain_guided(model, guide, PROMPT, gen_length=4) for guide in (masking, contrary))
    assert (masked.tokens, masked.order) == (plain.tokens, plain.order)


def test_guide_needs_a_prompt(model: PlainModel) -> None:
    with pytest.raises(ValueError):
        plain_guided(model, echo, [], gen_length=4)
