"""The bytes of a tokenizer's tokens."""

from functools import lru_cache

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from vllm.tokenizers import TokenizerLike

from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.structured_output.lifting import Vocabulary

_CHECKED = 256
"""Tokens that are decoded to compare."""


@lru_cache(maxsize=4)
def vocabulary_of(tokenizer: TokenizerLike | None, vocab_size: int) -> Vocabulary:
    """The tokenizer's, with as many tokens as the model predicts; reading it takes a while the first time.

    Raises ``InvalidRequestError`` for a tokenizer whose text is not the bytes of its tokens, end to end (``tokenizer``
    is None with ``skip_tokenizer_init``).
    """
    if tokenizer is None:
        raise InvalidRequestError("structured_outputs needs a tokenizer: start the engine without skip_tokenizer_init")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise _refused("it is none of Hugging Face's fast tokenizers")
    decoder = backend.decoder.__getstate__().decode() if backend.decoder else ""
    if '"ByteLevel"' not in decoder and '"ByteFallback"' not in decoder:
        raise _refused("its tokens are not bytes")
    read = _byte_level if '"ByteLevel"' in decoder else _byte_fallback
    added = backend.get_added_tokens_decoder()
    spelled = [b""] * vocab_size
    for token, number in backend.get_vocab().items():
        if number < vocab_size and number not in added:
            spelled[number] = read(token)
    # A sample of tokens decodes to its bytes, alone and together.
    used = [number for number, text in enumerate(spelled) if text.decode(errors="ignore").encode() == text != b""]
    sample = used[:: max(1, len(used) // _CHECKED)]
    spaced = [number for number in used if spelled[number].startswith(b" ")][:8]
    for numbers in (sample, *([number] for number in (*spaced, *sample[:32]))):
        if backend.decode(numbers) != b"".join(spelled[number] for number in numbers).decode():
            raise _refused("it decodes tokens to other text than the bytes of each")
    return Vocabulary(spelled)


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
