"""Small random checkpoints in the layouts of the released ones, written to a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 150  # no multiple of vLLM's padding of vocabularies
MASK = 140
EOS = 141
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

_VOCABULARY: Config = {
    "vocab_size": VOCAB_SIZE,
    "mask_token_id": MASK,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
_TRANSFORMERS_NAMES = _VOCABULARY | {
    "hidden_act": "silu",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""What all families but LLaDA have, by the names that transformers gives it."""
CONFIGS: dict[str, Config] = {
    "llada": _VOCABULARY
    | {
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
    },
    "dream": _TRANSFORMERS_NAMES
    | {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "intermediate_size": 112,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "use_sliding_window": False,
    },
    "llada_moe": _TRANSFORMERS_NAMES
    | {
        "architectures": ["LLaDAMoEModelLM"],
        "model_type": "llada",
        "dense_intermediate_size": 112,
        "expert_intermediate_size": 48,
        "shared_expert_intermediate_size": None,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_layer_freq": [1, 1],
        "moe_router_enable_expert_bias": False,
        "norm_topk_prob": None,
        "moe_router_score_function": "softmax",
        "num_key_value_heads": 4,
        "qk_layernorm": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000,
        "partial_rotary_factor": 1,
        "rope_scaling": None,
        "attention_bias": False,
        "clip_qkv": None,
    },
    "sdar": _TRANSFORMERS_NAMES
    | {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "block_size": 4,
        "intermediate_size": 112,
        "head_dim": 24,  # heads need not fill the hidden size
        "rope_theta": 1000000,
        "attention_bias": False,
    },
    "illada": _TRANSFORMERS_NAMES
    | {
        "architectures": ["ILLaDAForCausalLM"],
        "model_type": "illada",
        "intermediate_size": 112,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "mlp_bias": False,
    },
    "llada2": _TRANSFORMERS_NAMES
    | {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "block_size": 8,
        "intermediate_size": 112,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
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
        "use_qk_norm": True,
    },
}
CONFIGS["dream_reasoner"] = CONFIGS["sdar"] | {
    "architectures": ["DreamForCausalLM"],
    "model_type": "Dream",
}
CONFIGS["dream_reasoner"]["block_size"] = 8
CONFIGS["a2d"] = CONFIGS["illada"] | {
    "architectures": ["A2DQwen2LMHeadModel"],
    "model_type": "a2d-qwen2",
    "kind": "mdlm",
    "mlp_bias": None,
}
CONFIGS["a2d_bd3lm"] = CONFIGS["sdar"] | {
    "architectures": ["A2DQwen3LMHeadModel"],
    "model_type": "a2d-qwen3",
    "kind": "bd3lm",
    "block_size": 8,
}
CONFIGS["open_dcoder"] = CONFIGS["illada"] | {
    "architectures": ["OpenDcoderForCausalLM"],
    "model_type": "qwen2",
    "mlp_bias": None,
}
CONFIGS["sdar_moe"] = CONFIGS["sdar"] | {
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
CONFIGS["stable_diffcoder"] = CONFIGS["illada"] | {
    "architectures": ["StableDiffcoderForCausalLM"],
    "model_type": "llama",
    "block_size": 4,
    "tie_word_embeddings": False,
}
WITH_BIASES = (
    "DreamModel",
    "A2DQwen2LMHeadModel",
    "OpenDcoderForCausalLM",
    "Fast_dLLM_QwenForCausalLM",
)
"""Architectures with biases of queries, keys and values."""
CONFIGS["fast_dllm_v2"] = CONFIGS["illada"] | {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "model_type": "Fast_dLLM_Qwen",
    "bd_size": 8,
    "mlp_bias": None,
}
CONFIGS["nemotron_labs"] = CONFIGS["sdar"] | {
    "architectures": ["NemotronLabsDiffusionModel"],
    "model_type": "nemotron_labs_diffusion",
    "block_size": 8,
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
ALL_KINDS_OF_EXPERTS: Config = {
    "moe_layer_freq": [0, 1],
    "shared_expert_intermediate_size": 32,
    "moe_router_enable_expert_bias": True,
    "num_key_value_heads": 2,
}
"""A dense layer and one with all that layers with experts may have."""


def _llada_tensors(c: Config, draw: "_Draw") -> Tensors:
    d, mlp, root = c["d_model"], c["mlp_hidden_size"], "model.transformer."
    kv = d // c["n_heads"] * c["n_kv_heads"]
    t: Tensors = {
        root + "wte.weight": draw.embedding(c["embedding_size"], d),
        root + "ln_f.weight": draw.norm(d),
    }
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
        t[p + "ff_proj.weight"], t[p + "up_proj.weight"] = (
            draw.linear(mlp, d),
            draw.linear(mlp, d),
        )
        t[p + "ff_out.weight"] = draw.linear(d, mlp)
    return t


def _other_tensors(c: Config, draw: "_Draw") -> Tensors:
    d = c["hidden_size"]
    heads = c["num_attention_heads"]
    kv_heads = c["num_key_value_heads"]
    head_dim = c.get("head_dim", d // heads)
    is_llada2 = c["model_type"] == "llada2_moe"
    embedding = (
        "model.word_embeddings.weight" if is_llada2 else "model.embed_tokens.weight"
    )
    t = {
        embedding: draw.embedding(c["vocab_size"], d),
        "model.norm.weight": draw.norm(d),
    }
    if not c["tie_word_embeddings"]:
        t["lm_head.weight"] = draw.head(c["vocab_size"], d)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        t[p + "input_layernorm.weight"], t[p + "post_attention_layernorm.weight"] = (
            draw.norm(d),
            draw.norm(d),
        )
        if is_llada2:
            t[p + "attention.query_key_value.weight"] = draw.linear(
                (heads + 2 * kv_heads) * head_dim, d
            )
            t[p + "attention.dense.weight"] = draw.linear(d, heads * head_dim)
        else:
            for name, rows in (
                ("q_proj", heads),
                ("k_proj", kv_heads),
                ("v_proj", kv_heads),
            ):
                t[f"{p}self_attn.{name}.weight"] = draw.linear(rows * head_dim, d)
                if c["architectures"][0] in WITH_BIASES:
                    t[f"{p}self_attn.{name}.bias"] = draw.bias(rows * head_dim)
            t[p + "self_attn.o_proj.weight"] = draw.linear(d, heads * head_dim)
        if c.get(
            "use_qk_norm",
            c.get(
                "qk_layernorm",
                c["architectures"][0].startswith(("SDAR", "DreamFor", "A2DQwen3")),
            ),
        ):
            names = (
                ("attention.query_layer", "attention.key_layer")
                if is_llada2
                else ("self_attn.q_", "self_attn.k_")
            )
            t |= {f"{p}{name}norm.weight": draw.norm(head_dim) for name in names}
        if not _has_experts(c, i):
            _add_mlp(
                t,
                p + "mlp.",
                d,
                c.get("dense_intermediate_size") or c["intermediate_size"],
                draw,
            )
            continue
        width = c.get("expert_intermediate_size") or c["moe_intermediate_size"]
        t[p + "mlp.gate.weight"] = draw.linear(c["num_experts"], d)
        if c.get("moe_router_enable_expert_bias"):
            t[f"{p}mlp.{'gate.' if is_llada2 else ''}expert_bias"] = draw.bias(
                c["num_experts"]
            )
        for n in range(c["num_experts"]):
            _add_mlp(t, f"{p}mlp.experts.{n}.", d, width, draw)
        if shared := c.get("shared_expert_intermediate_size") or width * c.get(
            "num_shared_experts", 0
        ):
            _add_mlp(
                t,
                p + ("mlp.shared_experts." if is_llada2 else "shared_expert."),
                d,
                shared,
                draw,
            )
    return t


def _has_experts(c: Config, layer: int) -> bool:
    if "moe_layer_freq" in c:
        return bool(c["moe_layer_freq"][layer])
    if "decoder_sparse_step" in c:
        return (
            layer not in c["mlp_only_layers"]
            and (layer + 1) % c["decoder_sparse_step"] == 0
        )
    return layer >= c.get("first_k_dense_replace", layer + 1)


def _add_mlp(t: Tensors, p: str, d: int, width: int, draw: "_Draw") -> None:
    t[p + "gate_proj.weight"], t[p + "up_proj.weight"] = (
        draw.linear(width, d),
        draw.linear(width, d),
    )
    t[p + "down_proj.weight"] = draw.linear(d, width)


def write(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    edit: Callable[[Tensors], object] | None = None,
    **config: Any,
) -> Path:
    """A checkpoint; ``config`` overrides keys (None removes one), ``edit`` changes the
    tensors in place.
    """
    c = CONFIGS[family] | config
    tensors = (_llada_tensors if "d_model" in c else _other_tensors)(c, _Draw(seed))
    if c["model_type"] == "nemotron_labs_diffusion":
        names = {"model": "encoder", "lm_head": "diffusion_head"}
        for name in [*tensors]:
            first, _, rest = name.partition(".")
            tensors[f"{names[first]}.{rest}"] = tensors.pop(name)
    if edit is not None:
        edit(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, c.get("torch_dtype") or "float32")
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in c.items() if v is not None}, indent=1)
    )
    return folder


def write_adapter(
    folder: Path,
    checkpoint: Path,
    modules: list[str],
    *,
    rank: int = 3,
    seed: int = 1,
    **config: Any,
) -> Path:
    """A random LoRA adapter of a checkpoint's modules, as PEFT saves it; ``config``
    adds keys to its config.
    """
    weights, draw, t = load_file(checkpoint / "model.safetensors"), _Draw(seed), {}
    for module in modules:
        out_features, in_features = weights[f"{module}.weight"].shape
        t[f"base_model.model.{module}.lora_A.weight"] = draw.linear(rank, in_features)
        t[f"base_model.model.{module}.lora_B.weight"] = draw.linear(out_features, rank)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(t, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    stated = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 6,
        "bias": "none",
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(stated | config))
    return folder


def write_guide(folder: Path, model_type: str = "llama", **config: Any) -> Path:
    """A random causal model, as transformers saves it."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB_SIZE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **(sizes | config))
    )
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(8)  # decisive logits
    model.save_pretrained(folder)
    return folder


def shard(folder: Path, num_files: int = 3) -> Path:
    """Split a checkpoint's one file into several with an index, as large checkpoints
    come.
    """
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
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


class _Draw:
    """Weights large enough for decisive logits, so that rounding does not decide what
    is unmasked.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def embedding(self, rows: int, width: int) -> torch.Tensor:
        embedding = self._normal(rows, width)
        embedding[MASK] *= (
            0.1  # no trained model predicts its mask, also where this is the head
        )
        return embedding

    def linear(self, rows: int, columns: int) -> torch.Tensor:
        return self._normal(rows, columns) * 1.5 / columns**0.5

    def head(self, rows: int, width: int) -> torch.Tensor:
        head = self._normal(rows, width) * 4.0 / width**0.5
        head[MASK] = 0
        return head

    def bias(self, size: int) -> torch.Tensor:
        return self._normal(size) * 0.5

    def norm(self, size: int) -> torch.Tensor:
        return 1 + 0.2 * self._normal(size)
