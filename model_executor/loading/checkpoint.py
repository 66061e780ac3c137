"""A checkpoint's files, checked before a model is made of them."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig
from vllm.config import VllmConfig

from dllm_engine.families import family_of
from dllm_engine.model_executor.loading.file_kinds import check_files
from dllm_engine.model_executor.loading.lora import MERGE, LoraAdapter
from dllm_engine.model_executor.models.configs import Config, read_json_object, unsupported_model
from dllm_engine.model_executor.models.decoder import MODEL_CLASSES, DecoderShape

INDEX = "model.safetensors.index.json"
_SIZES = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size"),
    "vocab_size",
)
_LOAD_FORMATS = ("auto", "hf", "safetensors")
"""Formats that an adapter can be merged into."""
_EXPERT_SIZES = ("num_experts", "expert_intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def check_safetensors(model: str) -> dict[str, tuple[Path, list[int]]]:
    """The tensors in the model folder ``model``: the file and the shape of each, by name.

    A name that is no local folder is left to vLLM, which downloads it; it has none here.

    Raises:
        ValueError: naming the file that is missing from the folder, or damaged.
    """
    folder = Path(model)
    if not folder.is_dir():
        return {}
    files = set(folder.glob("*.safetensors")) | _files_of_index(folder)
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file; copy the checkpoint's weights there")
    tensors = {}
    for path in sorted(files):
        try:
            with safe_open(path, framework="pt") as file:
                tensors.update({name: (path, list(file.get_slice(name).get_shape())) for name in sorted(file.keys())})
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or incomplete ({error}); copy it again") from error
    return tensors


def _files_of_index(folder: Path) -> set[Path]:
    """The files that the folder's index lists, all of which are there; none without an index."""
    index = folder / INDEX
    if not index.is_file():
        return set()
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: 'weight_map' must be a table of tensor names and files; copy the file again")
    names = set(map(str, weight_map.values()))
    if odd := sorted(name for name in names if Path(name).name != name or not name.endswith(".safetensors")):
        raise ValueError(f"{index}: 'weight_map' names {odd[0]!r}, which is no *.safetensors file of this folder")
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise ValueError(f"{index}: {', '.join(missing)} is listed but missing from {folder}; copy it there")
    return {folder / name for name in names}


def check_config(config: PretrainedConfig) -> None:
    """Check a config that may have been changed since its file was read, and that a model can be served with it.

    Raises ``ValueError`` naming the file, the key and what it may be.
    """
    if not isinstance(config, Config):
        raise ValueError(unsupported_model(str(config.name_or_path), config.model_type, config.architectures))
    config.check()


def check_checkpoint(model: str, config: PretrainedConfig, *, with_weights: bool = True) -> None:
    """Check that ``config`` describes a model that can be served, and the weights in the folder ``model``.

    The weights are not read, only their shapes: a size that is wrong by orders of magnitude would end in an
    allocation that the system answers with a signal.

    Raises:
        ValueError: naming the file, and the key or tensor, that is missing, damaged or does not fit the others.
    """
    check_files(model)
    check_config(config)
    if not with_weights:
        return
    model_class, shape = MODEL_CLASSES[family_of(config).architecture], DecoderShape.of(config)
    keys = [config.attribute_map.get(name, name) for name in _SIZES]
    keys += [name for name in _EXPERT_SIZES if hasattr(config, name)]
    stated = f"{Path(model) / 'config.json'} ({', '.join(f'{key}={getattr(config, key)}' for key in keys)})"
    by_parameter = _expected_shapes(shape)
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # Some checkpoints have one projection for all three.
    qkv_rows = {"q": q_size, "k": kv_size, "v": kv_size, None: q_size + 2 * kv_size}
    is_quantized = getattr(config, "quantization_config", None) is not None
    num_layers = 0
    tensors = check_safetensors(model)
    for name, (path, found) in tensors.items():
        parameter, shard = model_class.locate(name)
        if parameter.startswith("layers."):
            _, layer, parameter = parameter.split(".", 2)
            num_layers = max(num_layers, int(layer) + 1)
        expected = by_parameter.get(parameter, found)
        if parameter in ("qkv_proj.weight", "qkv_proj.bias"):
            expected = [qkv_rows[shard], shape.hidden_size][: len(found)]  # type: ignore[index] # names of shards
        # Packed weights have other shapes; norms and the embedding are never packed.
        is_plain = not is_quantized or len(found) == 1 or parameter == "embedding.weight"
        if is_plain and found != expected:
            raise ValueError(f"{path}: tensor {name!r} has the shape {found}, not the {expected} of {stated}")
    if tensors and num_layers != shape.num_layers:
        raise ValueError(f"{model}: the weights hold {num_layers} layers, not the {shape.num_layers} of {stated}")


def _expected_shapes(shape: DecoderShape) -> dict[str, list[int]]:
    """Shapes of the tensors that fill each parameter, but for those of queries, keys and values."""
    hidden, experts = shape.hidden_size, shape.experts
    shapes = {key: [shape.vocab_size, hidden] for key in ("embedding.weight", "lm_head.weight")}
    shapes |= {key: [hidden] for key in ("attn_norm.weight", "mlp_norm.weight", "final_norm.weight")}
    shapes |= {key: [shape.head_dim] for key in ("q_norm.weight", "k_norm.weight")}
    shapes["out_proj.weight"] = [hidden, shape.num_heads * shape.head_dim]
    widths = {"mlp.gate_up_proj.": shape.intermediate_size}
    if experts is not None:
        shapes |= {"mlp.gate.weight": [experts.num_experts, hidden], "mlp.expert_bias": [experts.num_experts]}
        widths["mlp.shared_expert.gate_up_proj."] = experts.shared_intermediate_size
        widths["mlp.experts.routed_experts.w13_"] = experts.intermediate_size
    for name, width in widths.items():
        down = name.replace("gate_up", "down").replace("w13", "w2")
        shapes |= {f"{name}weight": [width, hidden], f"{down}weight": [hidden, width]}
    return shapes


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
    if config.tie_word_embeddings and (head := [n for n in adapter.updates if locate(n)[0] == "lm_head.weight"]):
        raise ValueError(f"{where}: the model's head is its embedding, so {head[0]!r} cannot change; {MERGE}")
    # Those of a model that has to be downloaded are checked when they are loaded.
    if tensors := check_safetensors(model_config.model):
        adapter.check({name: shape for name, (_, shape) in tensors.items()})
