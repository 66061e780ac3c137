"""A checkpoint's files, checked before a model is made of them."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from dllm_engine.families import family_of
from dllm_engine.model_executor.loading.file_kinds import check_files
from dllm_engine.model_executor.models.configs import (
    Config,
    ExpertShape,
    read_json_object,
    unsupported_model,
)
from dllm_engine.model_executor.models.decoder import DecoderShape, DiffusionDecoder
from dllm_engine.model_executor.models.dream import DreamModel
from dllm_engine.model_executor.models.llada import LLaDAModelLM
from dllm_engine.model_executor.models.llada2 import LLaDA2MoeModelLM
from dllm_engine.model_executor.models.llada_moe import LLaDAMoEModelLM
from dllm_engine.model_executor.models.mlp import expert_shard
from dllm_engine.model_executor.models.names import Shard
from dllm_engine.model_executor.models.sdar import SDARForCausalLM, SDARMoeForCausalLM

INDEX = "model.safetensors.index.json"
MODEL_CLASSES: dict[str, type[DiffusionDecoder]] = {
    model.__name__: model
    for model in (LLaDAModelLM, LLaDAMoEModelLM, DreamModel, SDARForCausalLM, SDARMoeForCausalLM, LLaDA2MoeModelLM)
}
"""By the architecture that a checkpoint names."""
_SIZES = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size"),
    "vocab_size",
)
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
    model_class = MODEL_CLASSES[family_of(config).architecture]
    shape = DecoderShape.of(config)
    if not with_weights:
        return
    keys = [config.attribute_map.get(name, name) for name in _SIZES]
    keys += [name for name in _EXPERT_SIZES if hasattr(config, name)]
    stated = f"{Path(model) / 'config.json'} ({', '.join(f'{key}={getattr(config, key)}' for key in keys)})"
    wanted = (
        shapes_in_layer(shape, None)
        | shapes_in_layer(shape, shape.experts)
        | {
            ("embedding.weight", None): [shape.vocab_size, shape.hidden_size],
            ("lm_head.weight", None): [shape.vocab_size, shape.hidden_size],
            ("final_norm.weight", None): [shape.hidden_size],
            # Some checkpoints have one projection for all three.
            ("qkv_proj.weight", None): [(shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, shape.hidden_size],
        }
    )
    is_quantized = getattr(config, "quantization_config", None) is not None
    num_layers = 0
    tensors = check_safetensors(model)
    for name, (path, found) in tensors.items():
        parameter, shard = model_class.locate(name)
        if parameter.startswith("layers."):
            _, layer, parameter = parameter.split(".", 2)
            num_layers = max(num_layers, int(layer) + 1)
        # Packed weights have other shapes; norms and the embedding are never packed.
        is_plain = not is_quantized or len(found) == 1 or parameter == "embedding.weight"
        expected = wanted.get((parameter, shard), found)
        if is_plain and found != expected:
            raise ValueError(f"{path}: tensor {name!r} has the shape {found}, not the {expected} of {stated}")
    if tensors and num_layers != shape.num_layers:
        raise ValueError(f"{model}: the weights hold {num_layers} layers, not the {shape.num_layers} of {stated}")


def shapes_in_layer(shape: DecoderShape, experts: ExpertShape | None) -> dict[tuple[str, Shard], list[int]]:
    """Shapes of the tensors of a layer with ``experts`` or without, by parameter and shard, as a model's ``locate``
    names them."""
    hidden, q_size, kv_size = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[tuple[str, Shard], list[int]] = {
        ("attn_norm.weight", None): [hidden],
        ("mlp_norm.weight", None): [hidden],
        ("out_proj.weight", None): [hidden, q_size],
    }
    for shard, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
        shapes["qkv_proj.weight", shard] = [rows, hidden]
        if shape.qkv_bias:
            shapes["qkv_proj.bias", shard] = [rows]
    if shape.qk_norm:
        shapes |= {("q_norm.weight", None): [shape.head_dim], ("k_norm.weight", None): [shape.head_dim]}
    if experts is None:
        return shapes | _shapes_of_mlp("mlp", hidden, shape.intermediate_size)
    shapes["mlp.gate.weight", None] = [experts.num_experts, hidden]
    if experts.has_bias:
        shapes["mlp.expert_bias", None] = [experts.num_experts]
    if experts.shared_intermediate_size:
        shapes |= _shapes_of_mlp("mlp.shared_expert", hidden, experts.shared_intermediate_size)
    width = experts.intermediate_size
    for projection, size in (("gate", [width, hidden]), ("up", [width, hidden]), ("down", [hidden, width])):
        for number in range(experts.num_experts):
            place = expert_shard(f"mlp.experts.{number}.{projection}_proj", "weight")
            assert place is not None
            shapes[place] = size
    return shapes


def _shapes_of_mlp(name: str, hidden: int, width: int) -> dict[tuple[str, Shard], list[int]]:
    return {
        (f"{name}.gate_up_proj.weight", 0): [width, hidden],
        (f"{name}.gate_up_proj.weight", 1): [width, hidden],
        (f"{name}.down_proj.weight", None): [hidden, width],
    }
