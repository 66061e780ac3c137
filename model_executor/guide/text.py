"""Translation between a canvas and a guide: the guide's input, and its answer in the
diffusion model's tokens.

A guide with the same tokenizer reads the canvas's tokens as they are. A guide with
another tokenizer reads the same text in its own tokens. Both tokenizers must be
byte-level, so that it is known which tokens share a character.
"""

import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from vllm.tokenizers import cached_tokenizer_from_config

from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.families import every_end_token

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_BYTE_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}
_UNREADABLE = b"\xff"
"""Bytes of an id that is not a token. They are invalid UTF-8, so they are shown as the
replacement character.
"""
_REPLACEMENT_SIZE = len("\ufffd".encode())
_PROBE = "A naïve probe: 3.14 €,  你好 – if (x != y) {\n\treturn; }\n"


@dataclass(frozen=True)
class Reading:
    """The guide's input: a canvas up to its last drafted token."""

    tokens: list[int]
    """Tokens of the guide."""
    spelling: list[Span]
    """Per drafted token, the span of ``tokens`` that share a character with it; empty
    if there are none.
    """
    lead: list[int | None]
    """Per drafted token, the number of bytes of its first guide token that belong to
    text before it; None if this is unknown, inside an unreadable character."""


class SameTokens:
    """Translation for a guide with the diffusion model's own tokenizer."""

    def __init__(self, mask_token_id: int) -> None:
        self.never_said: tuple[int, ...] = (mask_token_id,)
        """Tokens that the guide must not answer with: the mask would mean an open
        position.
        """

    def read(self, tokens: list[int], drafted: list[int]) -> Reading:
        """Make the guide's input. ``tokens``: tokens of the canvas without masks;
        ``drafted``: indices of the tokens to be judged.
        """
        return Reading(tokens, [Span(i, i + 1) for i in drafted], [0] * len(drafted))

    def answer(
        self, reading: Reading, index: int, draft: int, guided: Sequence[int]
    ) -> int:
        """Translate the guide's answer into the token of the diffusion model that
        replaces ``draft``, the drafted token with this ``index``. ``guided``: the
        guide's own tokens in place of ``reading.spelling[index]``."""
        return guided[0]


class ByteVocabulary:
    """The bytes of each token of a byte-level tokenizer."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """``name``: name of the model, for the ``ValueError`` about a tokenizer that is
        not byte-level.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"{name!r} has no tokenizer.json, which a guide with another tokenizer "
                f"needs; add one"
            )
        self.added = {
            number: added.content
            for number, added in backend.get_added_tokens_decoder().items()
        }
        """Content of the added tokens, which tokenizers match before they split text.
        Special tokens are among them.
        """
        self.special = {
            n
            for n, added in backend.get_added_tokens_decoder().items()
            if added.special
        }
        self.spelled: dict[int, bytes] = {
            number: content.encode() for number, content in self.added.items()
        }
        for token, number in backend.get_vocab(with_added_tokens=False).items():
            if number in self.added:
                continue
            if not _BYTE_OF_LETTER.keys() >= set(token):
                raise ValueError(
                    f"the tokenizer of {name!r} does not spell bytes (its token "
                    f"{token!r}), so text cannot be carried over between model and "
                    f"guide; choose a guide of the model's own tokenizer family, or "
                    f"one where both have byte-level BPE"
                )
            self.spelled[number] = bytes(_BYTE_OF_LETTER[letter] for letter in token)

    def spell(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.spelled.get(token, _UNREADABLE) for token in tokens)


class ShownText:
    """Bytes as text, with the replacement character for invalid UTF-8, and the place of
    each byte in the text.
    """

    def __init__(self, data: bytes) -> None:
        self.text = data.decode(errors="replace")
        self._characters = [
            0,
            *accumulate(len(character.encode()) for character in self.text),
        ]
        """Place of the first byte of each character."""
        self._places: list[int] = []
        """Places of the bytes. The bytes of an invalid sequence share one place."""
        place = 0
        while len(self._places) < len(data):
            rest = data[len(self._places) :]
            try:
                rest.decode()
                valid = len(rest)
                invalid = 0
            except UnicodeDecodeError as error:
                valid = error.start
                invalid = error.end - error.start
            self._places += [*range(place, place + valid), *[place + valid] * invalid]
            place += valid + _REPLACEMENT_SIZE * bool(invalid)

    def character(self, byte: int) -> Span:
        """Span of the character that contains a byte, in bytes of the shown text."""
        number = bisect_right(self._characters, self._places[byte])
        return Span(*self._characters[number - 1 : number + 1])

    def place(self, byte: int) -> int | None:
        """Place of a byte in the shown text; None if it shares a replacement character
        with the byte before it.
        """
        place = self._places[byte]
        return None if byte and self._places[byte - 1] == place else place


class Retokenizer:
    """Translation for a guide with another tokenizer, by way of text."""

    never_said: tuple[int, ...] = ()

    def __init__(
        self,
        tokenizer: Any,
        name: str,
        guide_tokenizer: Any,
        guide_name: str,
        end_tokens: Sequence[int],
        mask: int,
    ) -> None:
        """Take the tokenizers of the diffusion model and of the guide. Raises
        ``ValueError`` if they are not byte-level.

        Special tokens are matched by their content. For a special token that the guide
        does not have: an end token (of ``end_tokens``, of which the first stands for
        the guide's end token in the other direction) becomes the guide's end token; the
        BOS token becomes the guide's, or nothing; any other token becomes its content
        as text, separate from the text beside it.
        """
        self.vocabulary = ByteVocabulary(tokenizer, name)
        self.guide_vocabulary = ByteVocabulary(guide_tokenizer, guide_name)
        self.encoder = Tokenizer.from_str(guide_tokenizer.backend_tokenizer.to_str())
        # Normalized text would no longer be the text of the canvas.
        self.encoder.normalizer = None
        self.encoder.encode_special_tokens = True
        if (
            self.guide_vocabulary.spell(
                self.encoder.encode(_PROBE, add_special_tokens=False).ids
            )
            != _PROBE.encode()
        ):
            raise ValueError(
                f"the tokenizer of {guide_name!r} does not give a text back byte for "
                f"byte (it may put a space in front of it), so it cannot read drafts "
                f"of {name!r}; choose another guide"
            )
        by_content = {
            self.guide_vocabulary.added[number]: number
            for number in self.guide_vocabulary.special
        }
        self.counterpart: dict[int, int | None] = {}
        """The guide's token for each special token of the model; None: it reads
        nothing.
        """
        self.special_answer: dict[int, int] = {}
        """The model's token for each special token of the guide."""
        if end_tokens and guide_tokenizer.eos_token_id is not None:
            self.special_answer[guide_tokenizer.eos_token_id] = end_tokens[0]
        self.special = {*self.vocabulary.special, *end_tokens}
        for number in self.special:
            if (
                same := by_content.get(self.vocabulary.added.get(number, ""))
            ) is not None:
                self.counterpart[number] = same
                self.special_answer[same] = number
            elif number in end_tokens and guide_tokenizer.eos_token_id is not None:
                self.counterpart[number] = guide_tokenizer.eos_token_id
            elif number == tokenizer.bos_token_id:
                self.counterpart[number] = guide_tokenizer.bos_token_id
        plain = {
            n: spelled
            for n, spelled in self.vocabulary.spelled.items()
            if n not in self.special and n != mask
        }
        self.number_of = {
            spelled: number for number, spelled in sorted(plain.items(), reverse=True)
        }
        self.longest = max(map(len, self.number_of))
        # Cached: between the special tokens of a chat, only the text of the response
        # changes from step to step.
        self._tokens_of_old_text = functools.lru_cache(maxsize=1024)(
            self._tokens_of_text
        )

    @classmethod
    def between(cls, model_config: "ModelConfig", guide: str) -> "Retokenizer":
        """Load both tokenizers. ``guide``: folder or Hugging Face name."""
        return cls(
            cached_tokenizer_from_config(model_config),
            model_config.model,
            AutoTokenizer.from_pretrained(guide),
            guide,
            every_end_token(model_config.hf_config),
            model_config.hf_config.mask_token_id,
        )

    def read(self, tokens: list[int], drafted: list[int]) -> Reading:
        spelling: dict[int, tuple[Span, int | None]] = dict.fromkeys(
            drafted, (Span(0, 0), None)
        )
        guided: list[int] = []
        # Split into runs: each special token is a run.
        for _, run in groupby(
            range(len(tokens)), lambda i: i if tokens[i] in self.special else -1
        ):
            index, *others = run
            if tokens[index] not in self.counterpart:
                self._read_text(tokens, [index, *others], guided, spelling)
            elif (guide_token := self.counterpart[tokens[index]]) is not None:
                guided.append(guide_token)
                if index in spelling:
                    spelling[index] = Span(len(guided) - 1, len(guided)), 0
        return Reading(
            guided, [spelling[i][0] for i in drafted], [spelling[i][1] for i in drafted]
        )

    def answer(
        self, reading: Reading, index: int, draft: int, guided: Sequence[int]
    ) -> int:
        """The longest token that begins the guide's text. If the guide agrees with the
        drafted token, or none of its text begins at the same place, this is the drafted
        token."""
        first, stop = reading.spelling[index]
        read = reading.tokens[first:stop]
        agreed = next(
            (i for i, (a, b) in enumerate(zip(read, guided, strict=True)) if a != b),
            None,
        )
        lead = reading.lead[index]
        if agreed is None or lead is None:
            return draft
        word = guided[agreed]
        if word in self.guide_vocabulary.special:
            if agreed == 0 and lead == 0:
                return self.special_answer.get(word, draft)
            text = self.guide_vocabulary.spell(read[:agreed])
        else:
            text = self.guide_vocabulary.spell([*read[:agreed], word])
        if text[:lead] != self.guide_vocabulary.spell(read)[:lead]:
            return draft
        text = text[lead:]
        for size in range(min(self.longest, len(text)), 0, -1):
            if (number := self.number_of.get(text[:size])) is not None:
                return number
        return draft

    def _read_text(
        self,
        tokens: list[int],
        indices: list[int],
        guided: list[int],
        spelling: dict[int, tuple[Span, int | None]],
    ) -> None:
        """Append the guide's tokens for a run of text tokens to ``guided``, and note
        the spelling of the wanted tokens.
        """
        spelled = [self.vocabulary.spelled.get(tokens[i], _UNREADABLE) for i in indices]
        if spelling.keys().isdisjoint(indices):
            guided += self._tokens_of_old_text(
                b"".join(spelled).decode(errors="replace")
            )
            return
        shown = ShownText(b"".join(spelled))
        read = self._tokens_of_text(shown.text)
        ends = list(
            accumulate(len(self.guide_vocabulary.spelled[token]) for token in read)
        )
        for index, (begin, stop) in zip(
            indices, pairwise(accumulate(map(len, spelled), initial=0)), strict=True
        ):
            if index in spelling:
                first = bisect_right(ends, shown.character(begin).start)
                last = bisect_right(ends, shown.character(stop - 1).stop - 1)
                lead = shown.place(begin)
                if lead is not None and first:
                    lead -= ends[first - 1]
                start = len(guided)
                spelling[index] = Span(start + first, start + last + 1), lead
        guided += read

    def _tokens_of_text(self, text: str) -> list[int]:
        """The guide's tokens of a text."""
        return self.encoder.encode(text, add_special_tokens=False).ids


GuideReader = SameTokens | Retokenizer
"""Translates between a diffusion model and its guide."""
