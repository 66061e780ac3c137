"""A checkpoint's files, checked before a model is made of them. vLLM and transformers check the rest."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from vllm.config import VllmConfig

from dllm_engine.families import family_of
from dllm_engine.model_executor.loading.lora import MERGE, LoraAdapter
from dllm_engine.model_executor.models.decoder import MODEL_CLASSES

_LOAD_FORMATS = ("auto", "hf", "safetensors")
"""Formats that an adapter can be merged into."""


def check_safetensors(model: str) -> set[str]:
    """Names of the tensors in the model folder ``model``.

    A name that is no local folder is left to vLLM, which downloads it; it has none here.

    Raises:
        ValueError: the folder has no weights, or a file is damaged; names it.
    """
    folder = Path(model)
    if not folder.is_dir():
        return set()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file; copy the checkpoint's weights there")
    names: set[str] = set()
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                names.update(file.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or incomplete ({error}); copy it again") from error
    return names


def check_adapter(folder: str, vllm_config: VllmConfig) -> None:
    """Raise ``ValueError`` where the LoRA adapter in ``folder`` cannot become part of an engine's weights."""
    adapter, where = LoraAdapter(folder), f"lora_path={folder!r}"
    load_format, model_config = vllm_config.load_config.load_format, vllm_config.model_config
    if load_format not in _LOAD_FORMATS:
        raise ValueError(f"{where}: load_format={load_format!r} adds no adapter; use {', '.join(_LOAD_FORMATS)}")
    config = model_config.hf_config
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{where}: the checkpoint {model_config.model} is quantized; {MERGE} before quantizing it")
    locate = MODEL_CLASSES[family_of(config).architecture].locate
    if config.tie_word_embeddings and (head := [n for n in adapter.scales if locate(n)[0] == "lm_head.weight"]):
        raise ValueError(f"{where}: the model's head is its embedding, so {head[0]!r} cannot change; {MERGE}")
    # Those of a model that has to be downloaded are checked when they are loaded.
    if names := check_safetensors(model_config.model):
        adapter.check(names)
