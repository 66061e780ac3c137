"""A guide with another tokenizer: what it reads, and what its answers mean."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.model_executor.guide.text import Retokenizer
from tests.oracles.guided import Texts
from tests.support.byte_level_tokenizers import NOTE, TALE, spelled, train_tokenizer

MASK = 999


@pytest.fixture
def own() -> PreTrainedTokenizerFast:
    """A copy, for a test to change."""
    return copy.deepcopy(train_tokenizer(TALE, 480, "<end>"))


@pytest.fixture
def guide() -> PreTrainedTokenizerFast:
    return copy.deepcopy(train_tokenizer(NOTE, 400, "<stop>"))


def retokenizer(own, guide, mask=MASK):
    return Retokenizer(own, "own", guide, "guide", [own.eos_token_id], mask)


def test_special_tokens_stand_for_the_same_or_are_shown_as_text(own, guide):
    """One that begins a text is left out."""
    own.add_special_tokens(
        {"additional_special_tokens": ["<g", "<shared>"], "bos_token": "<begin>"}
    )
    guide.add_special_tokens({"additional_special_tokens": ["<shared>"]})
    begin, h, marker, o, shared = own.convert_tokens_to_ids(
        ["<begin>", "h", "<g", "o", "<shared>"]
    )
    translator = retokenizer(own, guide)
    reading = translator.read([begin, h, marker, o, shared], [2])
    assert reading.tokens == guide.convert_tokens_to_ids(
        ["h", "<", "g", "o", "<shared>"]
    ), "which do not merge"
    assert reading.spelling == [Span(1, 3)]
    assert translator.answer(
        reading, 0, marker, guide.convert_tokens_to_ids(["<", "h"])
    ) == own.convert_tokens_to_ids("<")


def test_the_mask_is_never_an_answer(own, guide):
    dot, h, mask = own.convert_tokens_to_ids([".", "h", "g"])
    said = guide.convert_tokens_to_ids(["g"])
    reading = retokenizer(own, guide).read([dot, h], [1])
    assert retokenizer(own, guide).answer(reading, 0, 7, said) == mask
    assert retokenizer(own, guide, mask).answer(reading, 0, 7, said) == 7


@pytest.mark.parametrize("seed", range(60))
def test_reads_and_answers_as_the_plain_one(own, guide, seed):
    draw = random.Random(seed)
    end, stop = own.eos_token_id, guide.eos_token_id
    plain = Texts(
        spelled(own),
        lambda text: guide.encode(text, add_special_tokens=False),
        spelled(guide),
        {end: stop},
    )
    ids = [
        *range(480),
        end,
        end,
        888,
        888,
        *[i for i, text in plain.spelled.items() if text.isascii()] * 2,
    ]
    tokens = [draw.choice(ids) for _ in range(draw.randint(3, 40))]
    drafted = sorted(
        draw.sample(range(1, len(tokens)), draw.randint(1, len(tokens) - 1))
    )

    translator = retokenizer(own, guide)
    reading = translator.read(tokens, drafted)
    torch.manual_seed(seed)
    rows = torch.rand(len(reading.tokens), 420)
    for t, token in enumerate(reading.tokens[1:]):
        if draw.random() < 0.6:
            rows[t, token] = 2
        elif draw.random() < 0.2:
            rows[t, stop] = 2

    def judge(read: list[int]) -> torch.Tensor:
        assert read == reading.tokens
        return rows

    for index, judged in enumerate(plain.judge(judge, tokens, drafted)):
        span = reading.spelling[index]
        assert judged.read == reading.tokens[slice(*span)]
        if span.start == 0:  # nothing predicts the first token of a text
            continue
        assert torch.equal(
            torch.stack(judged.rows), rows[span.start - 1 : span.stop - 1]
        )
        said = rows[span.start - 1 : span.stop - 1].argmax(dim=1).tolist()
        assert (
            translator.answer(reading, index, tokens[drafted[index]], said)
            == judged.answer
        )


def test_tokenizers_that_do_not_spell_bytes_are_refused(own, guide):
    words = Tokenizer(models.WordLevel({"▁hello": 0, "?": 1}, unk_token="?"))
    other = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<stop>")
    with pytest.raises(
        ValueError,
        match=r"tokenizer of 'guide' does not spell bytes \(its token '▁hello'\)",
    ):
        retokenizer(own, other)
    with pytest.raises(ValueError, match="tokenizer of 'own' does not spell bytes"):
        retokenizer(other, guide)
    spacing = Tokenizer.from_str(guide.backend_tokenizer.to_str())
    spacing.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(
        ValueError, match="'guide' does not give a text back byte for byte"
    ):
        retokenizer(
            own, PreTrainedTokenizerFast(tokenizer_object=spacing, eos_token="<stop>")
        )
    with pytest.raises(ValueError, match=r"'guide' has no tokenizer\.json"):
        retokenizer(own, SimpleNamespace())
