"""Tokenizers whose checkpoints name a class of their own in remote code, registered so that it is never run."""

from transformers import AutoTokenizer, Qwen2Tokenizer

from dllm_engine.families import DREAM
from dllm_engine.model_executor.models.configs import CONFIG_CLASSES


class DreamTokenizer(Qwen2Tokenizer):
    """Dream's tokenizer is Qwen2's with other special tokens, which its files list.

    transformers looks the class up by the name in tokenizer_config.json, so the name is not free.
    """


def register_tokenizers() -> None:
    """Make ``AutoTokenizer`` use the classes above. Idempotent."""
    AutoTokenizer.register(CONFIG_CLASSES[DREAM.architecture], tokenizer_class=DreamTokenizer, exist_ok=True)
