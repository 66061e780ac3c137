"""Checks of an adapter before any process is started for a model."""

from vllm.config import VllmConfig

from dllm_engine.families import family_of
from dllm_engine.model_executor.adapters.lora import MERGE, LoraAdapter
from dllm_engine.model_executor.loading.checkpoint import MODEL_CLASSES, check_safetensors

_LOAD_FORMATS = ("auto", "hf", "safetensors")


def check_adapter(folder: str, vllm_config: VllmConfig) -> None:
    """Raise ``ValueError`` where the adapter in ``folder`` cannot become part of an engine's weights."""
    adapter, where = LoraAdapter(folder), f"lora_path={folder!r}"
    load_format, model_config = vllm_config.load_config.load_format, vllm_config.model_config
    if load_format not in _LOAD_FORMATS:
        raise ValueError(f"{where}: load_format={load_format!r} adds no adapter; use {', '.join(_LOAD_FORMATS)}")
    config = model_config.hf_config
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{where}: the checkpoint {model_config.model} is quantized; {MERGE} before quantizing it")
    locate = MODEL_CLASSES[family_of(config).architecture].locate
    if config.tie_word_embeddings and (head := [n for n in adapter.updates if locate(n)[0] == "lm_head.weight"]):
        raise ValueError(f"{where}: the model's head is its embedding, so {head[0]!r} cannot change; {MERGE}")
    # Those of a model that has to be downloaded are checked when they are loaded.
    if tensors := check_safetensors(model_config.model):
        adapter.check({name: shape for name, (_, shape) in tensors.items()})
