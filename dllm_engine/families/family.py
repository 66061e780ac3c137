"""A model family: its authors' decoding conventions, and what its checkpoints look
like.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

ScheduleKind = Literal["uniform", "timestep", "rounded"]
KeysForm = Literal[
    "dense", "olmo", "softmax_experts", "qwen3_experts", "grouped_experts"
]
"""Form of the keys of a config.json. ``dense``: transformers'. ``olmo``: OLMo's.
``softmax_experts``, ``qwen3_experts``, ``grouped_experts``: transformers', with those
of experts chosen by a softmax with a bias, by Qwen3-MoE's names, or in groups.
"""
Attention = Literal["full", "block_causal", "causal"]
"""Attention of a position. ``full``: the whole canvas. ``block_causal``: its own block
and the blocks before it, prompt included. ``causal``: itself and what is before, but
for positions of the running block, which attend to each other."""
BlockOrigin = Literal["canvas", "response"]
"""Where blocks that attention goes by are counted from. ``canvas``: its start, so that
the end of a prompt may lie inside a block. ``response``: its start, in both directions,
so that the first block of the prompt may be shorter."""
Shard = str | int | tuple[str, int] | None
"""Part of a fused parameter, as vLLM's layers name it; with the number of an expert;
None: the whole of a parameter.
"""
NamedModules = Mapping[str, tuple[str, Shard]]
"""Names of a checkpoint's modules in a layer: our module, and the shard of it that they
fill.
"""


@dataclass(frozen=True)
class TensorNames:
    """Names of a checkpoint's tensors. A family need not have all of the modules."""

    embedding: str
    final_norm: str
    head: str
    layers: str
    """Prefix of the layers; the number of the layer follows."""
    in_layer: NamedModules


_COMMON: NamedModules = {
    "input_layernorm": ("attn_norm", None),
    "post_attention_layernorm": ("mlp_norm", None),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
}
TRANSFORMERS_NAMES = TensorNames(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    layers="model.layers",
    in_layer={
        **_COMMON,
        "self_attn.q_proj": ("qkv_proj", "q"),
        "self_attn.k_proj": ("qkv_proj", "k"),
        "self_attn.v_proj": ("qkv_proj", "v"),
        "self_attn.q_norm": ("q_norm", None),
        "self_attn.k_norm": ("k_norm", None),
        "self_attn.o_proj": ("out_proj", None),
        "shared_expert.gate_proj": ("mlp.shared_expert.gate_up_proj", 0),
        "shared_expert.up_proj": ("mlp.shared_expert.gate_up_proj", 1),
        "shared_expert.down_proj": ("mlp.shared_expert.down_proj", None),
    },
)
"""Names in transformers' Llama, Qwen2 and Qwen3."""
LLADA_NAMES = TensorNames(
    embedding="model.transformer.wte",
    final_norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
    layers="model.transformer.blocks",
    in_layer={
        "attn_norm": ("attn_norm", None),
        "ff_norm": ("mlp_norm", None),
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "attn_out": ("out_proj", None),
        "ff_proj": ("mlp.gate_up_proj", 0),
        "up_proj": ("mlp.gate_up_proj", 1),
        "ff_out": ("mlp.down_proj", None),
    },
)
LLADA2_NAMES = replace(
    TRANSFORMERS_NAMES,
    embedding="model.word_embeddings",
    in_layer={
        **_COMMON,
        "attention.query_key_value": ("qkv_proj", None),
        "attention.query_layernorm": ("q_norm", None),
        "attention.key_layernorm": ("k_norm", None),
        "attention.dense": ("out_proj", None),
        "mlp.shared_experts.gate_proj": ("mlp.shared_expert.gate_up_proj", 0),
        "mlp.shared_experts.up_proj": ("mlp.shared_expert.gate_up_proj", 1),
        "mlp.shared_experts.down_proj": ("mlp.shared_expert.down_proj", None),
    },
)


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of a mixture of experts."""

    num_experts: int
    top_k: int
    """Experts that compute a row."""
    intermediate_size: int
    """Width of each expert."""
    shared_intermediate_size: int = 0
    """Width of the expert that computes every row; 0: there is none."""
    has_bias: bool = False
    """True if a bias is added to the router's probabilities."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain MLP instead."""
    renormalize: bool = False
    """True if the weights of a row from the softmax of the router's logits are divided
    by their sum.
    """
    num_groups: int = 0
    """Groups that experts are chosen by, from the sigmoid of the router's logits
    (LLaDA2); 0: all are one group.
    """
    num_kept: int = 0
    """Groups that a row's experts come from."""
    scale: float = 1.0
    """Factor of a row's weights, which sum to 1 before, where experts are in groups."""
    capacity: int = 0
    """Experts that the rows of a block share (LLaDA2.2). They take the place of groups;
    0: groups count.
    """


@dataclass(frozen=True)
class Disguise:
    """Another model's architecture in the configs of a family. Its models are known by
    a word of their own names, or by ``hf_overrides`` with the family's architecture.
    """

    architecture: str
    word: str


@dataclass(frozen=True)
class Unsupported:
    """Models that are not served although their configs are like a family's."""

    name: str
    """In the models' own names."""
    keys: tuple[str, ...]
    """Keys that only their configs state."""
    reason: str


@dataclass(frozen=True)
class Shape:
    """Sizes that released checkpoints share."""

    sizes: Mapping[str, Any]
    """Keys of the config that differ from the family's defaults."""
    checkpoints: tuple[str, ...] | None = None
    """None: all of the family."""


@dataclass(frozen=True)
class ModelFamily:
    """Facts that all checkpoints of one architecture share."""

    name: str
    model_type: str
    """``model_type`` in the checkpoint's config.json, which families may share."""
    architecture: str
    """The entry of ``architectures`` in config.json, which tells families apart, and
    under which vLLM finds the model class."""
    checkpoints: tuple[str, ...]
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """By the names that ``dllm bench`` knows them by."""
    disguise: "Disguise | None" = None
    """What released configs state instead; None: the two above."""

    # Decoding
    schedule: ScheduleKind = "uniform"
    """``uniform``: equal counts per step (LLaDA); ``timestep``: counts from a time grid
    (Dream); ``rounded``: the rounded share of what is left (dLLM).
    """
    shifts_logits: bool = False
    """True if position ``p`` is predicted by the hidden state of ``p - 1`` instead of
    ``p``.
    """
    default_unmasking: str = "low_confidence"
    default_block_length: int | None = 32
    """None: the whole response is one block. Where attention goes by blocks, a config
    has its own.
    """
    attention: Attention = "full"
    block_origin: BlockOrigin = "canvas"
    whole_blocks: bool = True
    """Where attention goes by blocks: True if the last one is decoded whole, steps of a
    block are counted as of a whole one, and a confidence of ``threshold`` itself is not
    enough (SDAR's loop, not Stable-DiffCoder's)."""
    seeds_blocks: bool = False
    """True if the first position of a block is predicted by the row before it, in the
    pass that keeps what is before the block (Fast-dLLM v2)."""
    scales_queries: bool = False
    """True if RoPE may state ``llama_4_scaling_beta``, by which queries grow with their
    positions."""
    experts_by_block: bool = False
    """True if the rows of a block of ``default_block_length`` share experts, so that
    blocks have no other length; by the config."""
    draft_rank: int | None = None
    """Rank of the released LoRA adapters that compute drafts; None: there are none.
    """
    exceeds_threshold: bool = False
    """True if a confidence of ``threshold`` itself is not enough."""
    filters_greedy: bool = True
    """True if ``top_p`` and ``top_k`` affect the confidences of greedy requests."""
    strict_entropy_threshold: bool = False
    """True if a position at exactly ``entropy_threshold`` does not pass, and no
    position may pass, as in d3LLM's code for Dream."""
    slow_fast: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of ``SlowFast``'s options that differ from LLaDA's, in the code of its
    authors.
    """

    # Tensors
    names: TensorNames = TRANSFORMERS_NAMES
    qkv_bias: bool = False
    """True if queries, keys and values have biases, unless a key of the config says so.
    """
    qk_norm: bool = False
    """True if each head of queries and keys goes through a norm before RoPE, unless a
    key of the config says so.
    """

    # config.json
    keys_form: KeysForm = "dense"
    key_names: Mapping[str, str] = field(default_factory=dict)
    """The family's own names of keys, by those of transformers."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a config may leave out."""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """Special tokens of the released vocabulary, for a config that leaves them out."""
    mask_token: str | None = None
    """The mask's name in the tokenizer, for a config that leaves its id out."""
    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Kinds of checkpoints that no key of a config tells apart, and what differs from
    this row. The model's own name has the word, or ``hf_overrides`` say it as ``kind``.
    """
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that would change the computation, and the values that are implemented, the
    default first.
    """
    without_effect: tuple[str, ...] = ()
    """Keys that say nothing about what the model computes."""
    turns_parts: bool = False
    """True if RoPE may turn a part of each head only."""
    tokenizer_class: str | None = None
    """Name in tokenizer_config.json of a class that is not transformers': Qwen2's
    tokenizer."""
    template_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the authors' code gives chat templates."""
    released_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Defaults of requests to released checkpoints that only their names tell from
    others.
    """
    block_size_in_name: str | None = None
    """Pattern of the names of released checkpoints that state the length of their
    blocks.
    """
    base_prompts_have_bos: bool = False
    """True if the authors begin the prompts of base models with the BOS token, which
    the tokenizer does not."""
    unsupported: tuple[Unsupported, ...] = ()
    barred: Unsupported | None = None
    """Models that are served, but whose tokens under ``keys`` are never chosen."""

    def block_length_of(self, gen_length: int) -> int:
        """Block length of a request that names none. Attention by blocks has the same
        for responses of any length.
        """
        return self.attention_block or min(
            self.default_block_length or gen_length, gen_length
        )

    @property
    def architectures(self) -> set[str]:
        """Architectures that a config of the family may state."""
        disguise = set() if self.disguise is None else {self.disguise.architecture}
        return {self.architecture} | disguise

    @property
    def has_blocks(self) -> bool:
        """True if attention goes by blocks, in some kind of the family."""
        kinds = [kind.get("attention", "full") for kind in self.kinds.values()]
        return any(attention != "full" for attention in (self.attention, *kinds))

    @property
    def attention_block(self) -> int | None:
        """The length of the blocks that attention goes by, unless a request names
        another; None: there are none.
        """
        return self.default_block_length if self.attention != "full" else None

    @property
    def has_one_pass(self) -> bool:
        """True if one forward pass over a whole canvas is what a response computes,
        wherever its prompt ends: attention goes by the positions alone.
        """
        return (
            self.attention != "causal"
            and self.block_origin == "canvas"
            and not self.seeds_blocks
        )

    def longest_canvas(self, max_model_len: int) -> int:
        """Canvas positions of a request of at most so many tokens: the block in which
        they end is whole.
        """
        return max_model_len + -max_model_len % (self.attention_block or 1)
