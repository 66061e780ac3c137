"""Errors about the files of a tokenizer, which transformers reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from dllm_engine.text import cut, one_line

_WHOLE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"


@contextmanager
def tokenizer_files_named(model: str) -> Iterator[None]:
    """Context in which a tokenizer is loaded: any error becomes a ``ValueError`` that
    names the damaged file.
    """
    try:
        yield
    except Exception as error:  # transformers and tokenizers may raise any error
        raise ValueError(
            f"{_damaged_file(model)} cannot be read: {cut(one_line(error))}"
        ) from None


def _damaged_file(model: str) -> str:
    folder = Path(model)
    if not folder.is_dir():
        return f"the tokenizer of {model}"
    if (whole := folder / _WHOLE).exists():
        try:
            Tokenizer.from_file(str(whole))
        except Exception:
            return str(whole)
    config = folder / _CONFIG
    return str(config) if config.exists() else f"the tokenizer in {folder}"
