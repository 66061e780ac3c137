"""Small random checkpoints in the layouts of the released ones, written to a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 150  # no multiple of vLLM's padding of vocabularies
MASK = 140
EOS = 141
Tensors = dict[str, torch.Tensor]

_VOCABULARY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "mask_token_id": MASK,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
LLADA_CONFIG: dict[str, Any] = _VOCABULARY | {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_theta": 500000.0,
    "alibi": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "weight_tying": False,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "mlp_hidden_size": 112,
    "embedding_size": VOCAB_SIZE,
    "max_sequence_length": 256,
}
_TRANSFORMERS_NAMES: dict[str, Any] = _VOCABULARY | {
    "hidden_act": "silu",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""What all other families have, by the names that transformers gives it."""
DREAM_CONFIG: dict[str, Any] = _TRANSFORMERS_NAMES | {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "intermediate_size": 112,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
}
LLADA_MOE_CONFIG: dict[str, Any] = _TRANSFORMERS_NAMES | {
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",
    "num_key_value_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "expert_intermediate_size": 48,
    "dense_intermediate_size": 112,
    "shared_expert_intermediate_size": None,
    "moe_layer_freq": [1, 1],
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
    "norm_topk_prob": None,
    "qk_layernorm": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000,
    "partial_rotary_factor": 1,
    "rope_scaling": None,
    "attention_bias": False,
    "clip_qkv": None,
}
SDAR_CONFIG: dict[str, Any] = _TRANSFORMERS_NAMES | {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "block_size": 4,
    "intermediate_size": 112,
    "head_dim": 24,  # heads need not fill the hidden size
    "rope_theta": 1000000,
    "attention_bias": False,
}
SDAR_MOE_CONFIG: dict[str, Any] = SDAR_CONFIG | {
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LLADA2_CONFIG: dict[str, Any] = _TRANSFORMERS_NAMES | {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "block_size": 8,
    "intermediate_size": 112,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "rope_theta": 600000,
}
ALL_KINDS_OF_EXPERTS: dict[str, Any] = {
    "moe_layer_freq": [0, 1],
    "shared_expert_intermediate_size": 32,
    "moe_router_enable_expert_bias": True,
    "num_key_value_heads": 2,
}
"""A dense layer and one with all that layers with experts may have."""


def write_llada(folder: Path, *, seed: int = 0, edit: Callable[[Tensors], None] | None = None, **config: Any) -> Path:
    """A LLaDA checkpoint; ``config`` overrides keys (None removes one), ``edit`` changes the tensors in place."""
    c = LLADA_CONFIG | config
    d, mlp, root = c["d_model"], c["mlp_hidden_size"], "model.transformer."
    kv = d // c["n_heads"] * c["n_kv_heads"]
    draw = _Draw(seed)
    t: Tensors = {root + "wte.weight": draw.embedding(c["embedding_size"], d), root + "ln_f.weight": draw.norm(d)}
    if not c["weight_tying"]:
        t[root + "ff_out.weight"] = draw.head(c["embedding_size"], d)
    for i in range(c["n_layers"]):
        p = f"{root}blocks.{i}."
        t[p + "attn_norm.weight"], t[p + "ff_norm.weight"] = draw.norm(d), draw.norm(d)
        for name, rows in (("q_proj", d), ("k_proj", kv), ("v_proj", kv)):
            t[f"{p}{name}.weight"] = draw.linear(rows, d)
            if c["include_qkv_bias"]:
                t[f"{p}{name}.bias"] = draw.bias(rows)
        t[p + "attn_out.weight"] = draw.linear(d, d)
        t[p + "ff_proj.weight"], t[p + "up_proj.weight"] = draw.linear(mlp, d), draw.linear(mlp, d)
        t[p + "ff_out.weight"] = draw.linear(d, mlp)
    return _write(folder, c, t, edit)


def write_dream(
    folder: Path,
    *,
    seed: int = 0,
    head_scale: float = 4.0,
    edit: Callable[[Tensors], None] | None = None,
    **config: Any,
) -> Path:
    """A Dream checkpoint; arguments as for ``write_llada``. A smaller ``head_scale`` makes it less sure of itself."""
    c = DREAM_CONFIG | config
    draw = _Draw(seed, head_scale)
    t = _outside_layers(c, draw)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        _add_attention(t, p, c, draw, with_biases=True)
        _add_mlp(t, p + "mlp.", c["hidden_size"], c["intermediate_size"], draw)
    return _write(folder, c, t, edit)


def write_llada_moe(
    folder: Path, *, seed: int = 0, edit: Callable[[Tensors], None] | None = None, **config: Any
) -> Path:
    """A LLaDA-MoE checkpoint; arguments as for ``write_llada``."""
    c = LLADA_MOE_CONFIG | config
    d, draw = c["hidden_size"], _Draw(seed)
    t = _outside_layers(c, draw)
    for i, has_experts in enumerate(c["moe_layer_freq"]):
        p = f"model.layers.{i}."
        _add_attention(t, p, c, draw, with_biases=False)
        if c["qk_layernorm"]:
            t |= {f"{p}self_attn.{name}_norm.weight": draw.norm(d // c["num_attention_heads"]) for name in "qk"}
        if not has_experts:
            _add_mlp(t, p + "mlp.", d, c["dense_intermediate_size"], draw)
            continue
        t[p + "mlp.gate.weight"] = draw.linear(c["num_experts"], d)
        if c["moe_router_enable_expert_bias"]:
            t[p + "mlp.expert_bias"] = draw.bias(c["num_experts"])
        for n in range(c["num_experts"]):
            _add_mlp(t, f"{p}mlp.experts.{n}.", d, c["expert_intermediate_size"], draw)
        if c["shared_expert_intermediate_size"]:
            _add_mlp(t, p + "shared_expert.", d, c["shared_expert_intermediate_size"], draw)
    return _write(folder, c, t, edit)


def write_sdar(folder: Path, *, seed: int = 0, edit: Callable[[Tensors], None] | None = None, **config: Any) -> Path:
    """A SDAR checkpoint; arguments as for ``write_llada``."""
    c = SDAR_CONFIG | config
    draw = _Draw(seed)
    t = _outside_layers(c, draw)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        _add_attention(t, p, c, draw, with_biases=False)
        t |= {f"{p}self_attn.{name}_norm.weight": draw.norm(c["head_dim"]) for name in "qk"}
        if "num_experts" not in c or i in c["mlp_only_layers"] or (i + 1) % c["decoder_sparse_step"]:
            _add_mlp(t, p + "mlp.", c["hidden_size"], c["intermediate_size"], draw)
            continue
        t[p + "mlp.gate.weight"] = draw.linear(c["num_experts"], c["hidden_size"])
        for n in range(c["num_experts"]):
            _add_mlp(t, f"{p}mlp.experts.{n}.", c["hidden_size"], c["moe_intermediate_size"], draw)
    return _write(folder, c, t, edit)


def write_sdar_moe(folder: Path, **arguments: Any) -> Path:
    """A SDAR-MoE checkpoint; arguments as for ``write_llada``."""
    return write_sdar(folder, **(SDAR_MOE_CONFIG | arguments))


def write_llada2(folder: Path, *, seed: int = 0, edit: Callable[[Tensors], None] | None = None, **config: Any) -> Path:
    """A LLaDA2 checkpoint; arguments as for ``write_llada``."""
    c = LLADA2_CONFIG | config
    d, head_dim, width, draw = c["hidden_size"], c["head_dim"], c["moe_intermediate_size"], _Draw(seed)
    t = _outside_layers(c, draw)
    t["model.word_embeddings.weight"] = t.pop("model.embed_tokens.weight")
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        t[p + "input_layernorm.weight"], t[p + "post_attention_layernorm.weight"] = draw.norm(d), draw.norm(d)
        rows = (c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * head_dim
        t[p + "attention.query_key_value.weight"] = draw.linear(rows, d)
        t[p + "attention.dense.weight"] = draw.linear(d, c["num_attention_heads"] * head_dim)
        if c["use_qk_norm"]:
            t |= {f"{p}attention.{name}_layernorm.weight": draw.norm(head_dim) for name in ("query", "key")}
        if i < c["first_k_dense_replace"]:
            _add_mlp(t, p + "mlp.", d, c["intermediate_size"], draw)
            continue
        t[p + "mlp.gate.weight"] = draw.linear(c["num_experts"], d)
        if c["moe_router_enable_expert_bias"]:
            t[p + "mlp.gate.expert_bias"] = draw.bias(c["num_experts"])
        for n in range(c["num_experts"]):
            _add_mlp(t, f"{p}mlp.experts.{n}.", d, width, draw)
        if c["num_shared_experts"]:
            _add_mlp(t, p + "mlp.shared_experts.", d, width * c["num_shared_experts"], draw)
    return _write(folder, c, t, edit)


def _outside_layers(c: dict[str, Any], draw: "_Draw") -> Tensors:
    t = {
        "model.embed_tokens.weight": draw.embedding(c["vocab_size"], c["hidden_size"]),
        "model.norm.weight": draw.norm(c["hidden_size"]),
    }
    if not c["tie_word_embeddings"]:
        t["lm_head.weight"] = draw.head(c["vocab_size"], c["hidden_size"])
    return t


def _add_attention(t: Tensors, p: str, c: dict[str, Any], draw: "_Draw", *, with_biases: bool) -> None:
    d, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim = c.get("head_dim", d // heads)
    q, kv = heads * head_dim, c["num_key_value_heads"] * head_dim
    t[p + "input_layernorm.weight"], t[p + "post_attention_layernorm.weight"] = draw.norm(d), draw.norm(d)
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        t[f"{p}self_attn.{name}.weight"] = draw.linear(rows, d)
        if with_biases:
            t[f"{p}self_attn.{name}.bias"] = draw.bias(rows)
    t[p + "self_attn.o_proj.weight"] = draw.linear(d, q)


def _add_mlp(t: Tensors, p: str, d: int, width: int, draw: "_Draw") -> None:
    t[p + "gate_proj.weight"], t[p + "up_proj.weight"] = draw.linear(width, d), draw.linear(width, d)
    t[p + "down_proj.weight"] = draw.linear(d, width)


def write_adapter(
    folder: Path, checkpoint: Path, modules: list[str], *, rank: int = 3, seed: int = 1, **config: Any
) -> Path:
    """A random LoRA adapter of a checkpoint's modules, as PEFT saves it; ``config`` adds keys to its config."""
    from safetensors.torch import load_file

    weights, draw, t = load_file(checkpoint / "model.safetensors"), _Draw(seed), {}
    for module in modules:
        out_features, in_features = weights[f"{module}.weight"].shape
        t[f"base_model.model.{module}.lora_A.weight"] = draw.linear(rank, in_features)
        t[f"base_model.model.{module}.lora_B.weight"] = draw.linear(out_features, rank)
    save_file(t, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none", "init_lora_weights": True}
    (folder / "adapter_config.json").write_text(json.dumps(stated | config))
    return folder


def shard(folder: Path, num_files: int = 3) -> Path:
    """Split a checkpoint's one file into several with an index, as large checkpoints come."""
    from safetensors.torch import load_file

    single = folder / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    names = sorted(tensors)
    weight_map = {}
    for i in range(num_files):
        file = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::num_files]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


class _Draw:
    """Weights large enough for decisive logits, so that rounding does not decide what is unmasked."""

    def __init__(self, seed: int, head_scale: float = 4.0) -> None:
        self.head_scale = head_scale
        self.generator = torch.Generator().manual_seed(seed)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def embedding(self, rows: int, width: int) -> torch.Tensor:
        embedding = self._normal(rows, width)
        embedding[MASK] *= 0.1  # no trained model predicts its mask, also where this is the head
        return embedding

    def linear(self, rows: int, columns: int) -> torch.Tensor:
        return self._normal(rows, columns) * 1.5 / columns**0.5

    def head(self, rows: int, width: int) -> torch.Tensor:
        head = self._normal(rows, width) * self.head_scale / width**0.5
        head[MASK] = 0
        return head

    def bias(self, size: int) -> torch.Tensor:
        return self._normal(size) * 0.5

    def norm(self, size: int) -> torch.Tensor:
        return 1 + 0.2 * self._normal(size)


def _write(folder: Path, config: dict[str, Any], tensors: Tensors, edit: Callable[[Tensors], None] | None) -> Path:
    if edit is not None:
        edit(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config.get("torch_dtype") or "float32")
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}, indent=1))
    return folder
