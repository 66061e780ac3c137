"""The feed-forward branch of a layer: a gated MLP, or a mixture of gated experts in
vLLM's ``FusedMoE``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm._custom_ops import grouped_topk
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.platforms import current_platform

from dllm_engine.families import ExpertShape

ArgumentsOf = Callable[[str], dict[str, Any]]
"""Maps the name of a layer's module (``mlp.down_proj``) to arguments of vLLM's class:
its quantization, and the name by which quantization methods know it."""
ROW_BLOCKS = "row_blocks"
"""Key of vLLM's forward context: number of each row's block, int64 ``[num_rows]``,
ascending.
"""


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) · up``, ``[num_rows, width]``. ``x`` is ``[num_rows, 2 · width]``,
    gates first.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    # vLLM's kernel for CPUs takes five times as long as two kernels of PyTorch.
    if not gate_up.is_cuda or not hasattr(torch.ops._C, "silu_and_mul"):
        return F.silu(gate).mul_(up)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    torch.ops._C.silu_and_mul.default(out, gate_up)
    return out


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``"""

    def __init__(
        self,
        hidden_size: int,
        width: int,
        arguments_of: ArgumentsOf,
        *,
        shared: bool = False,
    ) -> None:
        """``shared``: the MLP is the shared expert of a mixture. vLLM then sums it over
        the tensor-parallel ranks together with the other experts.
        """
        super().__init__()
        name = "mlp.shared_expert" if shared else "mlp"
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, [width] * 2, bias=False, **arguments_of(f"{name}.gate_up_proj")
        )
        self.down_proj = RowParallelLinear(
            width,
            hidden_size,
            bias=False,
            reduce_results=not shared,
            **arguments_of(f"{name}.down_proj"),
        )

    def forward(self, normed: Tensor) -> Tensor:
        """``[num_rows, hidden_size]`` to the same shape."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(normed)[0]))[0]


class ExpertMLP(nn.Module):
    """Mixture of experts: each row goes through the experts that a router chooses, and
    through the shared expert.
    """

    def __init__(
        self, hidden_size: int, shape: ExpertShape, arguments_of: ArgumentsOf
    ) -> None:
        super().__init__()
        self.shape = shape
        in_model_type = not shape.num_groups or current_platform.is_cuda()
        self.router_type = torch.get_default_dtype() if in_model_type else torch.float32
        self.gate = ReplicatedLinear(
            hidden_size, shape.num_experts, bias=False, params_dtype=self.router_type
        )
        self.expert_bias = None
        if shape.has_bias:
            self.expert_bias = nn.Parameter(
                torch.zeros(shape.num_experts, dtype=torch.float32), requires_grad=False
            )
        self.shared_expert = None
        if shape.shared_intermediate_size:
            self.shared_expert = GatedMLP(
                hidden_size, shape.shared_intermediate_size, arguments_of, shared=True
            )
        self.experts = FusedMoEFactory(
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            hidden_size=hidden_size,
            intermediate_size=shape.intermediate_size,
            renormalize=shape.renormalize,
            custom_routing_function=self._route,
            shared_experts=self.shared_expert,
            **arguments_of("mlp.experts"),
        )

    def forward(self, normed: Tensor) -> Tensor:
        """``[num_rows, hidden_size]`` to the same shape, within
        ``DiffusionDecoder.forward_context``.
        """
        return self.experts(normed, self._router_logits(normed))

    def _router_logits(self, normed: Tensor) -> Tensor:
        """``[num_rows, num_experts]``. With groups, scores of experts may differ by
        only 4e-6, which half precision cannot represent: logits are float32, from
        weights in the model's type, as in the model's own code."""
        if self.shape.num_groups and normed.is_cuda and normed.dtype != torch.float32:
            # Products of half-precision numbers are exact in float32.
            return torch.mm(normed, self.gate.weight.t(), out_dtype=torch.float32)
        return self.gate(normed.to(self.router_type))[0]

    def _route(
        self,
        hidden_states: Tensor,
        gating_output: Tensor,
        topk: int,
        renormalize: bool,
    ) -> tuple[Tensor, Tensor]:
        """Weights (float32) and experts of each row, ``[num_rows, topk]``, from the
        router's logits ``[num_rows, num_experts]``. Weights sum to 1 if the shape
        renormalizes them. They include the bias, unless experts are in groups."""
        if gating_output.is_cuda and hasattr(torch.ops._moe_C, "topk_softmax"):
            if self.shape.num_groups and not self.shape.capacity:
                bias = (
                    gating_output.new_zeros(gating_output.shape[1])
                    if self.expert_bias is None
                    else self.expert_bias
                )
                sizes = (
                    self.shape.num_groups,
                    self.shape.num_kept,
                    topk,
                    topk > 1,
                    self.shape.scale,
                )
                # ``scoring_func=1`` is the sigmoid.
                weights, experts = grouped_topk(
                    gating_output, *sizes, bias, scoring_func=1
                )
                return weights, experts
            if self.expert_bias is None and not self.shape.num_groups:
                weights, experts, _ = fused_topk(
                    hidden_states, gating_output, topk, renormalize
                )
                return weights, experts
        if self.shape.num_groups:
            return self._route_by_group(gating_output.sigmoid(), topk)
        weights = gating_output.softmax(dim=-1, dtype=torch.float32)
        if self.expert_bias is not None:
            weights = weights + self.expert_bias
        best = weights.topk(topk, dim=-1)
        return best.values / best.values.sum(
            dim=-1, keepdim=True
        ) if renormalize else best.values, best.indices

    def _route_by_group(self, scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """The best experts of the best groups; the sum of its two best experts ranks a
        group. With a capacity instead of groups, the best of so many experts that are
        the best for any row of the block. The bias is used only in this choice."""
        biased = scores if self.expert_bias is None else scores + self.expert_bias
        if self.shape.capacity:
            blocks = get_forward_context().additional_kwargs[ROW_BLOCKS]
            per_row = blocks[:, None].expand_as(biased)
            best = torch.full_like(biased, -torch.inf).scatter_reduce(
                0, per_row, biased, "amax"
            )
            kept = best.topk(self.shape.capacity, dim=1).indices
            left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)[
                blocks
            ]
            experts = biased.masked_fill(left_out, -torch.inf).topk(topk, dim=1).indices
        else:
            grouped = biased.unflatten(1, (self.shape.num_groups, -1))
            kept = (
                grouped.topk(2, dim=2)
                .values.sum(dim=2)
                .topk(self.shape.num_kept, dim=1)
                .indices
            )
            left_out = torch.ones(
                grouped.shape[:2], dtype=torch.bool, device=scores.device
            ).scatter_(1, kept, False)
            experts = (
                grouped.masked_fill(left_out[..., None], -torch.inf)
                .flatten(1)
                .topk(topk, dim=1)
                .indices
            )
        weights = scores.gather(1, experts)
        if topk > 1:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return weights * self.shape.scale, experts
