"""The transformer of all supported diffusion models: pre-norm, RoPE, gated MLP.

Blocks are those of Llama, Qwen2 or Qwen3, some with experts. Families differ by their
configs and their rows in the table of families. A layer exposes its *parts*. It has no
``forward``: the loop over the layers belongs to a layer pass
(``model_executor/passes/base.py``), which may change the rows between and inside
layers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from dllm_engine.decoding.page_layout import head_dim_of
from dllm_engine.families import (
    FAMILIES,
    TRANSFORMERS_NAMES,
    ExpertShape,
    NamedModules,
    TensorNames,
)
from dllm_engine.kernels.rotary import rotary_table, rotate_
from dllm_engine.model_executor.loading.lora import DraftAdapter, LoraAdapter
from dllm_engine.model_executor.loading.parameters import fill_parameters
from dllm_engine.model_executor.models.config_keys import rotary_dim
from dllm_engine.model_executor.models.low_rank import LowRankUpdate
from dllm_engine.model_executor.models.mlp import (
    ROW_BLOCKS,
    ArgumentsOf,
    ExpertMLP,
    GatedMLP,
)
from dllm_engine.model_executor.models.norm import Norm
from dllm_engine.model_executor.models.rope_keys import QUERY_SCALE
from dllm_engine.options import EngineOptions


@dataclass(frozen=True)
class RotaryPhases:
    """RoPE phases of a set of rows."""

    positions: Tensor
    """Absolute positions in the canvas, int64."""
    table: Tensor
    """``rotary_table`` of the model."""
    query_scales: Tensor | None = None
    """Factor of queries at each position, float32 ``[num_positions]``; None: all are 1.
    """
    rows: Tensor | None = None
    """Index of each row in ``positions``, int64 ``[num_rows]``; None: in order."""

    def __getitem__(self, rows: Tensor | slice) -> "RotaryPhases":
        if self.rows is not None:
            rows = self.rows[rows]
        elif isinstance(rows, slice):
            return replace(self, positions=self.positions[rows])
        return replace(self, rows=rows)

    @property
    def row_query_scales(self) -> Tensor | None:
        """Factor of the query of each row, ``[num_rows]``."""
        if self.query_scales is None:
            return None
        rows = self.positions if self.rows is None else self.positions[self.rows]
        return self.query_scales[rows]


class DecoderLayer(nn.Module):
    """One layer, as parts. ``num_rows`` below is the number of rows that the layer pass
    computes.
    """

    def __init__(
        self, config: Any, number: int, arguments_of: ArgumentsOf, draft_rank: int = 0
    ) -> None:
        """``draft_rank``: rank of the low-rank update for rows of drafts; 0: there is
        none.
        """
        super().__init__()
        hidden_size, eps, self.head_dim = (
            config.hidden_size,
            config.rms_norm_eps,
            head_dim_of(config),
        )
        num_heads = config.num_attention_heads
        self.attn_norm = Norm(hidden_size, eps=eps)
        self.mlp_norm = Norm(hidden_size, eps=eps)
        has_head_norms = bool(getattr(config, "qk_layernorm", False))
        self.q_norm = Norm(self.head_dim, eps=eps) if has_head_norms else None
        self.k_norm = Norm(self.head_dim, eps=eps) if has_head_norms else None
        self.head_norm = (
            Norm(self.head_dim, eps=eps, has_weight=False) if has_head_norms else None
        )
        """Norm of queries and keys together, before their weights are applied."""
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            self.head_dim,
            num_heads,
            config.num_key_value_heads,
            bias=config.include_qkv_bias,
            **arguments_of("qkv_proj"),
        )
        self.out_proj = RowParallelLinear(
            num_heads * self.head_dim,
            hidden_size,
            bias=False,
            **arguments_of("out_proj"),
        )
        self.draft_update = None
        if draft_rank:
            sizes = num_heads * self.head_dim, hidden_size
            self.draft_update = LowRankUpdate(*sizes, draft_rank)
        experts: ExpertShape | None = getattr(config, "experts", None)
        self.mlp = (
            GatedMLP(hidden_size, config.intermediate_size, arguments_of)
            if experts is None or number in experts.dense_layers
            else ExpertMLP(hidden_size, experts, arguments_of)
        )
        """Feed-forward branch. Takes normed rows and returns its output ``[num_rows,
        hidden_size]``.
        """
        # Heads of this tensor-parallel rank.
        self.num_heads = self.qkv_proj.num_heads
        self.num_kv_heads = self.qkv_proj.num_kv_heads

    def qkv(
        self, normed: Tensor, phases: RotaryPhases, parts: str = "qkv"
    ) -> list[Tensor]:
        """Queries ``[num_rows, num_heads, head_dim]``, keys and values ``[num_rows,
        num_kv_heads, head_dim]``; queries and keys rotated to their positions.
        ``parts``: compute only ``"v"``, ``"k"`` or ``"qk"``, for methods that need some
        of them before the rest."""
        counts = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        first = sum(counts[part] for part in "qkv".partition(parts)[0])
        heads = self._projected(normed, first, sum(counts[part] for part in parts))
        values = (
            [heads.narrow(1, heads.shape[1] - counts["v"], counts["v"])]
            if "v" in parts
            else []
        )
        turned = {part: counts[part] for part in parts if part != "v"}
        if not turned:
            return values
        if self.head_norm is not None:
            heads = self.head_norm(heads.contiguous())
        heads = heads.narrow(1, 0, sum(turned.values()))
        split = heads.split([*turned.values()], dim=1)
        if self.head_norm is not None:
            for part, part_heads in zip(turned, split, strict=True):
                part_heads.mul_(getattr(self, f"{part}_norm").weight)
        rotate_(heads, phases.positions, phases.table, phases.rows)
        scales = phases.row_query_scales
        if scales is not None and "q" in turned:
            split[0].mul_(scales[:, None, None].to(heads.dtype))
        return [*split, *values]

    def o_proj(self, attended: Tensor, drafts: Tensor | None = None) -> Tensor:
        """The attention branch's output ``[num_rows, hidden_size]`` from ``[num_rows,
        num_heads, head_dim]``. ``drafts``: indices of the rows that get the update for
        drafts; None: there are none.
        """
        rows = attended.flatten(1)
        out: Tensor = self.out_proj(rows)[0]
        if drafts is None or self.draft_update is None:
            return out
        return out.index_add_(0, drafts, self.draft_update(rows[drafts]))

    def _projected(self, normed: Tensor, first: int, count: int) -> Tensor:
        """``count`` heads of the fused projection from head ``first`` on, ``[num_rows,
        count, head_dim]``. All heads are computed if the weight is quantized or
        prepacked, because it cannot be sliced then."""
        start = first * self.head_dim
        stop = (first + count) * self.head_dim
        weight = getattr(self.qkv_proj, "weight", None)
        bias = self.qkv_proj.bias
        shape = (
            (self.num_heads + 2 * self.num_kv_heads) * self.head_dim,
            normed.shape[-1],
        )
        if (
            stop - start == shape[0]
            or weight is None
            or weight.shape != shape
            or weight.dtype != normed.dtype
        ):
            projected = self.qkv_proj(normed)[0][..., start:stop]
        else:
            projected = F.linear(
                normed, weight[start:stop], None if bias is None else bias[start:stop]
            )
        return projected.view(projected.shape[0], count, self.head_dim)


class VocabularyShard(NamedTuple):
    """Logits of this tensor-parallel rank: ``logits[:, i]`` belongs to token
    ``first_token + i``.
    """

    logits: Tensor  # [num_rows, tokens of this rank]
    first_token: int


class DiffusionDecoder(nn.Module):
    """Embedding, layers, final norm and head. Each family of checkpoints has a
    subclass.
    """

    names: ClassVar[TensorNames] = TRANSFORMERS_NAMES
    packed_modules_mapping: ClassVar[dict[str, list[str]]]
    """Last part of the names of fused modules, and of the checkpoint's modules that
    fill them, in order. vLLM's quantization methods read it, so that lists of modules
    in a quantization config match the released names."""

    def __init_subclass__(cls) -> None:
        packed: dict[str, list[str]] = {}
        for released, (ours, shard) in cls.names.in_layer.items():
            parts = packed.setdefault(ours.rpartition(".")[2], [])
            if shard is not None and (last := released.rpartition(".")[2]) not in parts:
                parts.append(last)
        cls.packed_modules_mapping = {
            fused: parts for fused, parts in packed.items() if parts
        }

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        hf_config: Any = None,
        max_positions: int | None = None,
    ) -> None:
        """``hf_config``: config of a second model beside that of the engine, which is
        not quantized. ``max_positions``: length of the longest sequence; None: the
        canvas of ``max_model_len``."""
        super().__init__()
        self.vllm_config = vllm_config
        lora_path = draft_lora = None
        if hf_config is None:
            options = EngineOptions.from_vllm_config(vllm_config)
            lora_path = options.lora_path
            draft_lora = options.draft_lora
        self.adapter = LoraAdapter(lora_path) if lora_path is not None else None
        self.draft_adapter = None
        if draft_lora is not None:
            self.draft_adapter = DraftAdapter(vllm_config, draft_lora)
        self.takes_parts = False
        """True while ``load_weights`` gets tensors in parts."""
        model_config = vllm_config.model_config
        self.max_positions = (
            max_positions
            or model_config.hf_config.family.longest_canvas(model_config.max_model_len)
        )
        quant_config = vllm_config.quant_config if hf_config is None else None
        self.config = hf_config or model_config.hf_config
        self.experts: ExpertShape | None = getattr(self.config, "experts", None)
        sizes = self.config.vocab_size, self.config.hidden_size
        self.embedding = VocabParallelEmbedding(*sizes)
        self.layers = nn.ModuleList(
            DecoderLayer(
                self.config,
                number,
                vllm_arguments(
                    self.names.in_layer, f"{self.names.layers}.{number}", quant_config
                ),
                0 if self.draft_adapter is None else self.draft_adapter.rank(number),
            )
            for number in range(self.config.num_hidden_layers)
        )
        self.final_norm = Norm(self.config.hidden_size, eps=self.config.rms_norm_eps)
        self.lm_head = ParallelLMHead(
            *sizes, quant_config=quant_config, prefix=self.names.head
        )
        # Tied here, because vLLM changes the config of a checkpoint that also stores
        # its tied head, and would accept a different one.
        self.has_tied_head = self.config.tie_word_embeddings or (
            hf_config is None and model_config.word_embeddings_untied_by_checkpoint
        )
        if self.has_tied_head:
            self.lm_head = self.lm_head.tie_weights(self.embedding)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings ``[num_rows, hidden_size]`` of token ids ``[num_rows]``."""
        return self.embedding(input_ids)

    @cached_property
    def rotary_table(self) -> Tensor:
        """RoPE table. It is made on first use, so that it is not among the weights that
        ``sleep(level=2)`` discards.
        """
        return rope_table(
            self.config, self.max_positions, self.final_norm.weight.device
        )

    @cached_property
    def query_scales(self) -> Tensor | None:
        """Factor of queries at each position; None if all factors are 1."""
        rope = self.config.rope_parameters
        beta = rope.get(QUERY_SCALE)
        if not beta:
            return None
        device = self.final_norm.weight.device
        positions = torch.arange(self.max_positions, device=device)
        turns = positions // int(rope["original_max_position_embeddings"])
        return 1 + beta * torch.log1p(turns.float())

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        layer_pass: Callable[..., tuple[Tensor, Sequence[Tensor]]],
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Hidden states before the final norm, and the results of the pass.
        ``layer_pass(layers, hidden, phases)`` runs the layers over rows ``[num_rows,
        hidden_size]``.
        """
        with self.forward_context(positions):
            return layer_pass(
                self.layers,
                self.embed_input_ids(input_ids),
                RotaryPhases(positions, self.rotary_table, self.query_scales),
            )

    @contextmanager
    def forward_context(self, positions: Tensor) -> Iterator[None]:
        """vLLM's forward context, in which experts are looked up, with the block of
        each row if blocks share experts. Needed around every call of a layer's ``mlp``.
        """
        if self.experts is None:
            yield
            return
        with set_forward_context(None, self.vllm_config):
            if self.experts.capacity:
                # Rows are whole blocks: the first row of a block starts a new number.
                begins = positions % self.config.block_size == 0
                get_forward_context().additional_kwargs[ROW_BLOCKS] = (
                    begins.cumsum(0).clamp(min=1) - 1
                )
            yield

    def compute_logits(self, hidden_states: Tensor) -> VocabularyShard:
        """Logits of rows ``[num_rows, hidden_size]``: final norm and head, without
        gathering across ranks, and without padding.
        """
        head = self.lm_head
        logits = head.quant_method.apply(head, self.final_norm(hidden_states))
        shard = head.shard_indices
        return VocabularyShard(
            logits[:, : shard.num_org_elements], shard.org_vocab_start_index
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill the parameters from a checkpoint's tensors, as ``fill_parameters`` does."""
        if self.adapter is not None:
            weights = self.adapter.merged(weights, whole=not self.takes_parts)
        if self.draft_adapter is not None and not self.takes_parts:
            weights = chain(weights, self.draft_adapter.tensors())
        return fill_parameters(self, weights)


def vllm_arguments(
    modules: NamedModules, layer: str, quant_config: QuantizationConfig | None
) -> ArgumentsOf:
    """Arguments of vLLM's classes for the modules of a layer. Names of modules follow
    the checkpoint: ``self_attn.qkv_proj`` beside its ``self_attn.q_proj``."""

    def arguments_of(module: str) -> dict[str, Any]:
        released, shard = next(
            (
                (released, shard)
                for released, (ours, shard) in modules.items()
                if ours == module
            ),
            (module, None),
        )
        parent, _, last = f"{layer}.{released}".rpartition(".")
        name = last if shard is None else module.rpartition(".")[2]
        return dict(quant_config=quant_config, prefix=f"{parent}.{name}")  # noqa: C408

    return arguments_of


def rope_table(config: Any, num_positions: int, device: torch.device) -> Tensor:
    """``rotary_table`` by a config's RoPE keys, for sequences of at most
    ``num_positions``. The base of ``dynamic`` RoPE depends on this length."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        scaled = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
            config, device, seq_len=num_positions
        )
        return rotary_table(num_positions, *scaled)
    turned = rotary_dim(config, head_dim_of(config))
    exponents = torch.arange(0, turned, 2, device=device, dtype=torch.float32) / turned
    return rotary_table(num_positions, 1.0 / rope["rope_theta"] ** exponents)


MODEL_CLASSES: dict[str, type[DiffusionDecoder]] = {
    architecture: type(
        architecture,
        (DiffusionDecoder,),
        {"names": family.names, "__module__": __name__},
    )
    for architecture, family in FAMILIES.items()
}
"""Model classes by architecture."""
