"""The baseline: the same decoder in plain PyTorch, and decoding with it, one request at a time.

It is what the models' own repositories do, without their slow spots: attention is one call of PyTorch's, logits are
made for the masked rows of the block only. Nothing is kept between steps, except where the authors themselves keep the
keys and values of finished blocks (``ModelFamily.keeps_blocks``). Nothing of the engine runs; schedules and unmasking
rules, which decide what is computed but take no time, are its pure functions, so that both sides do the same work.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dllm_engine.families import family_of
from dllm_engine.model_executor.models.checkpoint import MODEL_CLASSES, shapes_in_layer
from dllm_engine.model_executor.models.configs import ExpertGroups
from dllm_engine.model_executor.models.decoder import DecoderShape, DiffusionDecoder
from dllm_engine.model_executor.models.mlp import expert_shard
from dllm_engine.model_executor.models.names import Shard
from dllm_engine.model_executor.unmasking.rules import PARALLEL_RULES
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics
from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import Blocks, DecodingSpec, Span
from dllm_engine.scheduler.step_plan import UnmaskQuota, unmask_quota
from dllm_engine.scheduler.unmasking import UNMASKING_POLICIES

_ENTROPY_EPS = 1e-10
Part = tuple[str, Shard]
"""A parameter of ``DiffusionDecoder``, and which shard of it."""
KeysValues = tuple[torch.Tensor, torch.Tensor]
"""``[num_kv_heads, num_tokens, head_dim]`` each."""


class PlainDecoder:
    """A diffusion model: weights, and layers as functions of them."""

    def __init__(self, config: Any, weights: dict[Part, torch.Tensor]) -> None:
        self.shape = decoder_shape(config)
        self.mask_token_id: int = config.mask_token_id
        self.weights = weights
        if self.shape.tied_embeddings:
            weights["lm_head.weight", None] = weights["embedding.weight", None]

    @classmethod
    def from_checkpoint(
        cls, folder: Path, config: Any, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> "PlainDecoder":
        """The weights in the safetensors files of a folder."""
        from safetensors import safe_open

        locate = model_class(config).locate
        weights: dict[Part, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt", device=str(device)) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                    weights[locate(name)] = tensors.get_tensor(name).to(dtype)
        shape = decoder_shape(config)
        rows = [heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        for name, shard in list(weights):
            if name.endswith("qkv_proj.weight") and shard is None:  # the checkpoint has one for all three
                parts = weights.pop((name, shard)).split(rows)
                weights |= {(name, part): weight for part, weight in zip("qkv", parts, strict=True)}
        return cls(config, weights)

    @classmethod
    def random(cls, config: Any, dtype: torch.dtype, device: torch.device | str = "cpu") -> "PlainDecoder":
        """Random weights of the config's shape."""
        draw = torch.Generator(device).manual_seed(0)
        weights = {
            part: torch.randn(size, generator=draw, device=device, dtype=dtype) * 0.02
            for part, size in _sizes(decoder_shape(config)).items()
        }
        return cls(config, weights)

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        distinct = {weight.data_ptr(): weight for weight in self.weights.values()}
        return sum(weight.numel() * weight.element_size() for weight in distinct.values())

    @property
    def device(self) -> torch.device:
        return self.weights["embedding.weight", None].device

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]``"""
        return F.embedding(token_ids, self.weights["embedding.weight", None])

    def phases(self, positions: torch.Tensor) -> KeysValues:
        """Cosines and sines of RoPE at ``positions``, float32 ``[num_rows, rotary_dim]`` each."""
        exponents = torch.arange(0, self.shape.rotary_dim, 2, device=positions.device).float() / self.shape.rotary_dim
        angles = positions.float()[:, None] * self.shape.rope_theta**-exponents
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def layer(
        self,
        number: int,
        x: torch.Tensor,
        phases: KeysValues,
        kept: KeysValues | None = None,
        visible: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, KeysValues]:
        """One layer over rows that attend to themselves and to what is ``kept``, as far as it is ``visible``: bool
        ``[num_rows, num_keys]``.

        Returns the rows, their queries ``[num_heads, num_rows, head_dim]`` and their own keys and values.
        """
        y = self._norm(x, f"layers.{number}.attn_norm")
        q, k, v = (
            self._linear(y, f"layers.{number}.qkv_proj", shard).unflatten(-1, (-1, self.shape.head_dim)).transpose(0, 1)
            for shard in "qkv"
        )
        if self.shape.qk_norm:
            q, k = self._norm(q, f"layers.{number}.q_norm"), self._norm(k, f"layers.{number}.k_norm")
        q, k = _rotate(q, phases), _rotate(k, phases)
        keys, values = (k, v) if kept is None else (torch.cat((kept[0], k), dim=1), torch.cat((kept[1], v), dim=1))
        group = self.shape.num_heads // self.shape.num_kv_heads
        if group > 1:
            keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
        attended = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=visible)[0]
        x = x + self._linear(attended.transpose(0, 1).flatten(1), f"layers.{number}.out_proj")
        y = self._norm(x, f"layers.{number}.mlp_norm")
        has_experts = self.shape.experts_of(number) is not None
        return x + (self._experts(y, number) if has_experts else self._mlp(y, f"layers.{number}.mlp")), q, (k, v)

    def _mlp(self, y: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = (self._linear(y, f"{name}.gate_up_proj", shard) for shard in (0, 1))
        return self._linear(F.silu(gate) * up, f"{name}.down_proj")

    def _experts(self, y: torch.Tensor, number: int) -> torch.Tensor:
        """One expert after the other, each on the rows that chose it."""
        name, experts = f"layers.{number}.mlp", self.shape.experts
        assert experts is not None
        bias = self.weights.get((f"{name}.expert_bias", None), 0)
        if experts.groups is None:
            shares = self._linear(y, f"{name}.gate").softmax(dim=-1, dtype=torch.float32) + bias
            weights, chosen = shares.topk(experts.top_k, dim=-1)
            weights = weights / weights.sum(dim=-1, keepdim=True) if experts.renormalize else weights
        else:
            shares = F.linear(y.float(), self.weights[f"{name}.gate.weight", None].float()).sigmoid()
            chosen = _best_of_groups(shares + bias, experts.top_k, experts.groups)
            weights = shares.gather(1, chosen)
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-20) if experts.top_k > 1 else weights
            weights = weights * experts.groups.scale
        out = self._mlp(y, f"{name}.shared_expert") if experts.shared_intermediate_size else torch.zeros_like(y)
        for expert in chosen.unique().tolist():
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up, down = (self.weights[_expert_part(number, expert, part)] for part in ("gate", "up", "down"))
            added = F.linear(F.silu(F.linear(y[rows], gate)) * F.linear(y[rows], up), down)
            out.index_add_(0, rows, added * weights[rows, place, None].to(y.dtype))
        return out

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_rows, vocab_size]``"""
        return F.linear(self._norm(x, "final_norm"), self.weights["lm_head.weight", None])[:, : self.shape.vocab_size]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight", None]
        return F.rms_norm(x, weight.shape, weight, self.shape.rms_norm_eps)

    def _linear(self, x: torch.Tensor, name: str, shard: str | int | None = None) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight", shard], self.weights.get((f"{name}.bias", shard)))


def model_class(config: Any) -> type[DiffusionDecoder]:
    """The engine's class for a config."""
    return MODEL_CLASSES[family_of(config).architecture]


def decoder_shape(config: Any) -> DecoderShape:
    """Sizes of a diffusion model's config."""
    return model_class(config).decoder_shape(config)


def _expert_part(layer: int, expert: int, projection: str) -> Part:
    place = expert_shard(f"mlp.experts.{expert}.{projection}_proj", "weight")
    assert place is not None
    return f"layers.{layer}.{place[0]}", place[1]


def _sizes(shape: DecoderShape) -> dict[Part, list[int]]:
    table = [shape.vocab_size, shape.hidden_size]
    sizes: dict[Part, list[int]] = {("embedding.weight", None): table, ("final_norm.weight", None): table[1:]}
    if not shape.tied_embeddings:
        sizes["lm_head.weight", None] = table
    for i in range(shape.num_layers):
        of_layer = shapes_in_layer(shape, shape.experts_of(i))
        sizes |= {(f"layers.{i}.{name}", shard): size for (name, shard), size in of_layer.items()}
    return sizes


def _rotate(x: torch.Tensor, phases: KeysValues) -> torch.Tensor:
    cos, sin = phases
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.float().chunk(2, dim=-1)
    turned = (turned * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    return torch.cat((turned, rest), dim=-1)


def _best_of_groups(shares: torch.Tensor, top_k: int, groups: ExpertGroups) -> torch.Tensor:
    """The ``top_k`` best experts of each row in the groups whose two best are the best."""
    grouped = shares.unflatten(-1, (groups.num_groups, -1))
    of_groups = grouped.topk(2).values.sum(dim=-1)
    kept = of_groups >= of_groups.topk(groups.num_kept).values[:, -1:]
    return grouped.where(kept[..., None], -torch.inf).flatten(1).topk(top_k).indices


# Decoding


@dataclass(frozen=True)
class PlainResponse:
    """What a request gave, to the end of its last block."""

    token_ids: list[int]
    """With ``end_tokens`` up to the first of them."""
    forward_passes: int
    tokens_computed: int
    """Rows fed to the model, summed over forward passes."""
    tokens_unmasked: int


class PlainCanvas:
    """A request's tokens, forward passes over them, and filling them in."""

    def __init__(self, model: PlainDecoder, prompt: list[int], spec: DecodingSpec) -> None:
        self.model, self.spec = model, spec
        tokens = prompt + [model.mask_token_id] * spec.num_masks
        self.tokens = torch.tensor(tokens, device=model.device)
        self.kept: list[KeysValues | None] = [None] * model.shape.num_layers
        """Keys and values of all positions before those that are fed."""
        self.num_forwards = self.num_rows = 0

    def forward(self, span: Span, *, keeps: bool = False) -> torch.Tensor:
        """Hidden states of ``span``, ``[num_rows, hidden_size]``; with ``keeps``, its keys and values are kept."""
        self.num_forwards, self.num_rows = self.num_forwards + 1, self.num_rows + span.size
        model, length, visible = self.model, self.spec.block_length, None
        positions = torch.arange(*span, device=model.device)
        if self.spec.is_block_causal and span.start // length != (span.stop - 1) // length:
            keys = torch.arange(span.stop, device=model.device)
            visible = keys // length <= (positions // length)[:, None]
        x, phases = model.embed(self.tokens[slice(*span)]), model.phases(positions)
        for number, kept in enumerate(self.kept):
            x, _, (k, v) = model.layer(number, x, phases, kept, visible)
            if keeps:
                self.kept[number] = (k, v) if kept is None else (torch.cat((kept[0], k), 1), torch.cat((kept[1], v), 1))
        return x

    def masked(self, span: Span) -> torch.Tensor:
        """Positions in ``span`` that are masked, ascending."""
        return (self.tokens[slice(*span)] == self.model.mask_token_id).nonzero()[:, 0] + span.start

    def fill(self, hidden: torch.Tensor, first_row: int, quota: UnmaskQuota) -> int:
        """Fill what ``quota`` asks for from hidden states of the rows from position ``first_row`` on; returns how
        many."""
        positions = self.masked(quota.candidates)
        predicting = (positions - 1).clamp(min=first_row) if self.spec.shifts_logits else positions
        statistics = self._statistics(self.model.logits(hidden[predicting - first_row]))
        confidence = statistics.confidence(UNMASKING_POLICIES[self.spec.unmasking].measures, positions)
        ordered, order = confidence.sort(descending=True, stable=True)
        if quota.parallel is not None:
            passes = PARALLEL_RULES[quota.parallel.kind](ordered, quota.parallel.value)
            if quota.guaranteed is not None:
                passes[0] = True
            chosen = order[passes]
        else:
            chosen = order[: quota.count]
        self.tokens[positions[chosen]] = statistics.token[chosen]
        return chosen.numel()

    def _statistics(self, logits: torch.Tensor) -> TokenStatistics:
        measures = UNMASKING_POLICIES[self.spec.unmasking].measures
        p = logits.float().softmax(dim=-1)
        allowed = logits.clone()
        allowed[:, self.model.mask_token_id] = -torch.inf  # a position filled with the mask would not count as filled
        token = allowed.argmax(dim=-1)
        best, second = p.topk(2, dim=-1).values.unbind(dim=-1) if measures == "margin" else (None, None)
        return TokenStatistics(
            token=token,
            probability=p.gather(-1, token[:, None])[:, 0],
            negative_entropy=(p * (p + _ENTROPY_EPS).log()).sum(dim=-1) if measures == "entropy" else None,
            margin=None if best is None or second is None else best - second,
            noise=None,
        )


def check_baseline(spec: DecodingSpec) -> None:
    """Raise ``ValueError`` for requests that the baseline does not decode: those that draw random numbers,
    guided ones, and those of several blocks at once."""
    if UNMASKING_POLICIES[spec.unmasking].measures == "noise" or spec.temperature > 0:
        raise ValueError(
            f"unmasking={spec.unmasking!r} at temperature {spec.temperature} draws random numbers, which the plain "
            f"baseline does not; choose a greedy policy, or leave the baseline out"
        )
    unknown = {
        **{name: getattr(spec, name) for name in ("delay_eos", "early_stop", "alg_temp")},
        **{name: getattr(spec, name) for name in ("confidence_eos_eot_inf", "logits_eos_inf")},
        "guide": spec.guidance is not None,
        "block_add_threshold": spec.block_add_threshold is not None,
        "slow_fast": spec.slow_fast is not None,
        "certainty_sigma": spec.certainty_sigma is not None,
        "tokens_per_step or steps_per_block beside a rule of parallel unmasking": spec.parallel is not None
        and (spec.tokens_per_step or spec.block_steps),
    }
    for name, is_asked in unknown.items():
        if is_asked:
            raise ValueError(f"the plain baseline knows no {name}; leave it unset, or leave the baseline out")


@torch.inference_mode()
def decode(
    model: PlainDecoder,
    prompt: list[int],
    spec: DecodingSpec,
    end_tokens: frozenset[int] = frozenset(),
    *,
    keeps_blocks: bool = False,
) -> Iterator[PlainResponse]:
    """Recompute the whole canvas in every step, or what a block attends to; yields after each block what there is so
    far.

    With ``keeps_blocks``, the prompt's whole blocks go through in a pass of their own and a step feeds its block alone;
    one more pass of each block, also of the last one, stores its keys and values.
    """
    canvas, num_unmasked = PlainCanvas(model, prompt, spec), 0
    if keeps_blocks and spec.blocks_start:
        canvas.forward(Span(0, spec.blocks_start), keeps=True)
    for block in range(spec.num_blocks):
        span, step = spec.block_span(block), 0
        of_response = Span(span.start, min(span.stop, spec.response_span.stop))
        first = span.start - span.start % spec.block_length if keeps_blocks else 0
        fed = Span(first, span.stop if spec.is_block_causal else spec.canvas_length)
        while canvas.masked(of_response).numel():
            left = canvas.masked(span).numel()
            quota = unmask_quota(spec, Progress(Blocks(block, block + 1), step, [left]), window_alone=False)
            hidden = canvas.forward(fed)
            if quota.parallel is not None or quota.count:
                num_unmasked += canvas.fill(hidden, fed.start, quota)
            step += 1
        if keeps_blocks:
            canvas.forward(fed, keeps=True)
        token_ids = canvas.tokens[spec.prompt_length : of_response.stop].tolist()
        end = next((i for i, token in enumerate(token_ids) if token in end_tokens), None)
        made = token_ids if end is None else token_ids[: end + 1]
        yield PlainResponse(made, canvas.num_forwards, canvas.num_rows, num_unmasked)
        if end is not None:
            return
