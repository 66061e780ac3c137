"""A guide with another tokenizer: what it reads, and what its answers mean."""

import random
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dllm_engine.model_executor.guide.text import Retokenizer
from dllm_engine.scheduler.request import Span
from tests.oracles.guided import Texts
from tests.support.byte_level_tokenizers import NOTE, TALE, spelled, train_tokenizer

MASK, END = 999, 700


def tokenizer_of(merges: list[str], special: dict[str, str]) -> PreTrainedTokenizerFast:
    """All bytes, what pairs of tokens merge to in this order, and special tokens by their role."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [(left, right) for left, right in (merge.split() for merge in merges)]
    for left, right in pairs:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


OWN = tokenizer_of(
    ["h e", "l l", "ll o", "o n", "on e", "ä ½", "Ġ g"],
    {"eos_token": "<end>", "bos_token": "<begin>", "pad_token": "<shared>"},
)
"""Has of 你 (E4 BD A0) the first two bytes as one token, and ``on``, ``one``."""
GUIDE = tokenizer_of(["h e", "l l", "he ll", "hell o", "Ġ o", "g o"], {"eos_token": "<stop>", "pad_token": "<shared>"})


def retokenizer(own=OWN, guide=GUIDE, mask=MASK):
    return Retokenizer(own, "own", guide, "guide", [own.eos_token_id, END], mask)


def own_ids(*tokens: str) -> list[int]:
    return OWN.convert_tokens_to_ids(list(tokens))


def guide_ids(*tokens: str) -> list[int]:
    return GUIDE.convert_tokens_to_ids(list(tokens))


def test_markers_that_the_guide_does_not_have_are_shown_as_text():
    own = tokenizer_of([], {"eos_token": "<end>", "additional_special_tokens": ["<g"]})
    translator = retokenizer(own)
    marker, h, o = own.convert_tokens_to_ids(["<g", "h", "o"])
    reading = translator.read([h, marker, o], [1])
    assert reading.tokens == guide_ids("h", "<", "g", "o"), "and do not merge with what is beside them"
    assert reading.spelling == [Span(1, 3)]
    assert translator.answer(reading, 0, marker, guide_ids("<", "hello")) == own.convert_tokens_to_ids("<")


def test_the_mask_is_never_an_answer():
    mask = own_ids("g")[0]
    reading = retokenizer().read(own_ids(".", "h"), [1])
    assert retokenizer().answer(reading, 0, 7, guide_ids("g")) == mask
    assert retokenizer(mask=mask).answer(reading, 0, 7, guide_ids("g")) == 7


@pytest.mark.parametrize("seed", range(60))
def test_reads_and_answers_as_the_plain_one(seed):
    draw = random.Random(seed)
    own, guide = train_tokenizer(TALE, 480, "<end>"), train_tokenizer(NOTE, 400, "<stop>")
    end, stop = own.eos_token_id, guide.eos_token_id
    plain = Texts(spelled(own), lambda text: guide.encode(text, add_special_tokens=False), spelled(guide), {end: stop})
    ids = [*range(480), end, end, 888, 888, *[i for i, text in plain.spelled.items() if text.isascii()] * 2]
    tokens = [draw.choice(ids) for _ in range(draw.randint(3, 40))]
    drafted = sorted(draw.sample(range(1, len(tokens)), draw.randint(1, len(tokens) - 1)))

    translator = Retokenizer(own, "own", guide, "guide", [end], MASK)
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
        assert torch.equal(torch.stack(judged.rows), rows[span.start - 1 : span.stop - 1])
        said = rows[span.start - 1 : span.stop - 1].argmax(dim=1).tolist()
        assert translator.answer(reading, index, tokens[drafted[index]], said) == judged.answer


def test_tokenizers_that_do_not_spell_bytes_are_refused():
    words = Tokenizer(models.WordLevel({"▁hello": 0, "?": 1}, unk_token="?"))
    other = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<stop>")
    with pytest.raises(ValueError, match=r"tokenizer of 'guide' does not spell bytes \(its token '▁hello'\)"):
        retokenizer(guide=other)
    with pytest.raises(ValueError, match="tokenizer of 'own' does not spell bytes"):
        retokenizer(own=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>"))
    spacing = Tokenizer.from_str(GUIDE.backend_tokenizer.to_str())
    spacing.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ValueError, match="'guide' does not give a text back byte for byte"):
        retokenizer(guide=PreTrainedTokenizerFast(tokenizer_object=spacing, eos_token="<stop>"))
    with pytest.raises(ValueError, match=r"'guide' has no tokenizer\.json"):
        retokenizer(guide=SimpleNamespace())
