"""Tokenizers whose checkpoints name a class of their own in remote code, registered so that it is never run."""

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer, Qwen2Tokenizer
from vllm.tokenizers import cached_tokenizer_from_config

from dllm_engine.families import DREAM
from dllm_engine.model_executor.loading.file_kinds import check_files
from dllm_engine.model_executor.models.configs import CONFIG_CLASSES

if TYPE_CHECKING:
    from vllm.config import ModelConfig

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "tokenizer_config.json")


class DreamTokenizer(Qwen2Tokenizer):
    """Dream's tokenizer is Qwen2's with other special tokens, which its files list.

    transformers looks the class up by the name in tokenizer_config.json, so the name is not free.
    """


def register_tokenizers() -> None:
    """Make ``AutoTokenizer`` use the classes above. Idempotent."""
    AutoTokenizer.register(CONFIG_CLASSES[DREAM.architecture], tokenizer_class=DreamTokenizer, exist_ok=True)


def check_tokenizer(model_config: "ModelConfig") -> None:
    """Raise ``ValueError`` naming the folder or file whose tokenizer is missing or damaged."""
    folder = Path(model_config.tokenizer)
    check_files(model_config.tokenizer)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"{folder} holds no tokenizer ({', '.join(TOKENIZER_FILES)}); copy the checkpoint's there, or set "
            f"skip_tokenizer_init=True and give token ids"
        )
    try:
        cached_tokenizer_from_config(model_config)
    except Exception as error:  # whatever a damaged file leads to
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the tokenizer of {model_config.tokenizer} cannot be loaded ({type(error).__name__}: {reason}); copy its "
            f"files again"
        ) from None
