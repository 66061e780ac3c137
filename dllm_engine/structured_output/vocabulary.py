"""The bytes of a tokenizer's tokens."""

import codecs
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from vllm.tokenizers import TokenizerLike

from dllm_engine.scheduler.options.request_options import InvalidRequestError

_CHECKED = 256
"""Tokens that are decoded to compare."""
_LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    token_bytes: np.ndarray
    """uint8: the bytes of all tokens, end to end."""
    starts: np.ndarray
    """int64 ``[vocab_size + 1]``: where those of each token begin. Special and added tokens have none, nor have
    numbers that the tokenizer does not use."""

    @cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.token_bytes.tobytes() + self.starts.tobytes(), digest_size=16).digest()

    def begun_character(self, tokens: Sequence[int]) -> bytes:
        """The bytes at the end of a text that begin a character; none where it ends with a whole one."""
        text = b""
        for token in reversed(tokens):
            spelled = self.token_bytes[self.starts[token] : self.starts[token + 1]].tobytes()
            text = spelled + text
            if not spelled or len(text) >= _LONGEST_CHARACTER:
                break
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(text)
        begun: bytes = decoder.getstate()[0]
        return begun


def vocabulary_of(tokenizer: TokenizerLike | None, vocab_size: int) -> Vocabulary:
    """Raises ``InvalidRequestError`` for a tokenizer whose text is not the bytes of its tokens, end to end."""
    if tokenizer is None:
        raise InvalidRequestError("structured_outputs needs a tokenizer: start the engine without skip_tokenizer_init")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise _refused("it is none of Hugging Face's fast tokenizers")
    decoder = backend.decoder.__getstate__().decode() if backend.decoder else ""
    if '"ByteLevel"' in decoder:
        read = _byte_level
    elif '"ByteFallback"' in decoder:
        read = _byte_fallback
    else:
        raise _refused("its tokens are not bytes")
    added = backend.get_added_tokens_decoder()
    spelled = [b""] * vocab_size
    for token, number in backend.get_vocab().items():
        if number < vocab_size and number not in added:
            spelled[number] = read(token)
    _check(backend, spelled)
    lengths = np.fromiter(map(len, spelled), np.int64, vocab_size)
    return Vocabulary(np.frombuffer(b"".join(spelled), np.uint8), np.concatenate([[0], np.cumsum(lengths)]))


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured_outputs is not supported with this model's tokenizer: {reason}; byte-level BPE is supported"
    )


_BYTE_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}


def _byte_level(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF_LETTER.__getitem__, token))
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _check(backend: Tokenizer, spelled: list[bytes]) -> None:
    """Raise an error unless a sample of tokens decodes to its bytes, alone and together."""
    used = [number for number, text in enumerate(spelled) if text and _is_text(text)]
    sample = used[:: max(1, len(used) // _CHECKED)]
    spaced = [number for number in used if spelled[number].startswith(b" ")][:8]

    def decodes(numbers: Iterable[int]) -> bool:
        numbers = list(numbers)
        return bool(backend.decode(numbers) == b"".join(spelled[number] for number in numbers).decode())

    if not decodes(sample) or not all(decodes([number]) for number in (*spaced, *sample[:32])):
        raise _refused("it decodes tokens to other text than the bytes of each")


def _is_text(text: bytes) -> bool:
    try:
        return bool(text.decode())
    except UnicodeDecodeError:
        return False
