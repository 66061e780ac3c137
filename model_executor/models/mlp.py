"""The feed-forward branch of a layer: a gated MLP, or a mixture of such experts in vLLM's ``FusedMoE``."""

import re
from collections.abc import Callable

import torch
from torch import nn
from vllm._custom_ops import grouped_topk
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig

from dllm_engine.kernels.vllm_operators import silu_and_mul
from dllm_engine.model_executor.models.config_keys import ExpertGroups, ExpertShape

ROW_BLOCKS = "row_blocks"
"""Key of vLLM's forward context: number of each row's block, int64 ``[num_rows]``, ascending."""


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``"""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        quant_config: QuantizationConfig | None,
        prefix_of: Callable[[str], str],
        *,
        name: str = "mlp",
        reduce_results: bool = True,
    ) -> None:
        """
        Args:
            prefix_of: the name that quantization methods know a module of the layer by, from ours.
            name: of this module in the layer.
            reduce_results: whether to sum over tensor-parallel ranks, or leave that to the caller.
        """
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=prefix_of(f"{name}.gate_up_proj"),
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=False,
            reduce_results=reduce_results,
            quant_config=quant_config,
            prefix=prefix_of(f"{name}.down_proj"),
        )

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` to the same shape."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(normed)[0]))[0]


class ExpertMLP(nn.Module):
    """Each row goes through the experts that a router chooses for it, and through the shared one."""

    def __init__(
        self,
        hidden_size: int,
        shape: ExpertShape,
        quant_config: QuantizationConfig | None,
        prefix_of: Callable[[str], str],
    ) -> None:
        super().__init__()
        self.groups = shape.groups
        # In the groups of LLaDA2 experts may be 4e-6 apart, which half precision would not tell.
        self.router_type = torch.get_default_dtype() if shape.groups is None else torch.float32
        self.gate = ReplicatedLinear(
            hidden_size, shape.num_experts, bias=False, params_dtype=self.router_type, prefix=prefix_of("mlp.gate")
        )
        self.expert_bias = None
        if shape.has_bias:
            self.expert_bias = nn.Parameter(torch.zeros(shape.num_experts, dtype=torch.float32), requires_grad=False)
        self.shared_expert = None
        if shape.shared_intermediate_size:
            # vLLM sums it over the ranks together with the routed experts.
            self.shared_expert = GatedMLP(
                hidden_size,
                shape.shared_intermediate_size,
                quant_config,
                prefix_of,
                name="mlp.shared_expert",
                reduce_results=False,
            )
        self.experts = FusedMoEFactory(
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            hidden_size=hidden_size,
            intermediate_size=shape.intermediate_size,
            quant_config=quant_config,
            renormalize=shape.renormalize,
            custom_routing_function=self._route,
            shared_experts=self.shared_expert,
            prefix=prefix_of("mlp.experts"),
        )

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` to the same shape, within ``DiffusionDecoder.forward_context``."""
        return self.experts(normed, self.gate(normed.to(self.router_type))[0])

    def _route(
        self, hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (float32) and experts of each row, ``[num_rows, topk]``, from the router's logits
        ``[num_rows, num_experts]``; the arguments are vLLM's.

        LLaDA-MoE neither makes the weights sum to 1 nor takes the bias off them again; SDAR-MoE, which has no bias,
        does the former, and LLaDA2 both.
        """
        if gating_output.is_cuda and hasattr(torch.ops._moe_C, "topk_softmax"):
            if self.groups is not None and not self.groups.capacity:
                bias = gating_output.new_zeros(gating_output.shape[1]) if self.expert_bias is None else self.expert_bias
                sizes = self.groups.num_groups, self.groups.num_kept, topk, topk > 1, self.groups.scale
                weights, experts = grouped_topk(gating_output, *sizes, bias, scoring_func=1)  # of the sigmoid
                return weights, experts
            if self.expert_bias is None:
                weights, experts, _ = fused_topk(hidden_states, gating_output, topk, renormalize)
                return weights, experts
        if self.groups is not None:
            return self._route_by_group(gating_output.sigmoid(), topk, self.groups)
        weights = gating_output.softmax(dim=-1, dtype=torch.float32)
        if self.expert_bias is not None:
            weights = weights + self.expert_bias
        best = weights.topk(topk, dim=-1)
        return best.values / best.values.sum(dim=-1, keepdim=True) if renormalize else best.values, best.indices

    def _route_by_group(
        self, scores: torch.Tensor, topk: int, groups: ExpertGroups
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best experts of the groups whose two best experts are the best; with a capacity, of so many experts that
        are the best for any row of the block. The bias has a say in nothing else."""
        biased = scores if self.expert_bias is None else scores + self.expert_bias
        if groups.capacity:
            blocks = get_forward_context().additional_kwargs[ROW_BLOCKS]
            per_row = blocks[:, None].expand_as(biased)
            best = torch.full_like(biased, -torch.inf).scatter_reduce(0, per_row, biased, "amax")
            kept = best.topk(groups.capacity, dim=1).indices
            left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)[blocks]
            experts = biased.masked_fill(left_out, -torch.inf).topk(topk, dim=1).indices
        else:
            grouped = biased.unflatten(1, (groups.num_groups, -1))
            kept = grouped.topk(2, dim=2).values.sum(dim=2).topk(groups.num_kept, dim=1).indices
            left_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, kept, False)
            experts = grouped.masked_fill(left_out[..., None], -torch.inf).flatten(1).topk(topk, dim=1).indices
        weights = scores.gather(1, experts)
        if topk > 1:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return weights * groups.scale, experts


_ROUTED_EXPERTS = "routed_experts"
"""vLLM's module that holds the weights of all experts."""
_SHARDS = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}
"""Projections of an expert: vLLM's parameter for those of all experts, and the part of it."""


def expert_shard(module: str, kind: str) -> tuple[str, tuple[str, int]] | None:
    """The parameter of a layer, and the shard of it, that a tensor ``kind`` of an expert fills; None for what is not an
    expert's. ``module`` is the checkpoint's name within the layer: ``mlp.experts.N.gate_proj``."""
    found = re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)", module)
    if found is None or found[2] not in _SHARDS:
        return None
    fused, part = _SHARDS[found[2]]
    return f"mlp.experts.{_ROUTED_EXPERTS}.{fused}_{kind}", (part, int(found[1]))


def expert_shards(parameter_name: str, num_experts: int) -> list[tuple[str, int]]:
    """The shards that a parameter of vLLM's module is filled by; none for other parameters."""
    module, kind = parameter_name.split(".")[-2:]
    parts = [part for fused, part in _SHARDS.values() if module == _ROUTED_EXPERTS and kind.startswith(f"{fused}_")]
    return [(part, number) for part in parts for number in range(num_experts)]
