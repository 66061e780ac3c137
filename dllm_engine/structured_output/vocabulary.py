"""The bytes of a tokenizer's tokens."""

from functools import lru_cache

from tokenizers import Tokenizer
from vllm.tokenizers import TokenizerLike

from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.structured_output.compiler import Vocabulary

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
    from xgrammar import TokenizerInfo, VocabType  # takes a while, for structured output alone

    vocabulary = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=0)
    if vocabulary.vocab_type == VocabType.RAW:
        raise _refused("its tokens are not bytes")
    added = backend.get_added_tokens_decoder()
    spelled = [b"" if number in added else text for number, text in enumerate(vocabulary.decoded_vocab)]
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
