"""Each operator on the device, ours and vLLM's, against its plain version on the CPU, at a model's sizes.

The plain version computes in float64 where it can, else in float32, from the same numbers.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from vllm.platforms import current_platform

from dllm_engine.check.checks import CannotRunError, Check, compare
from dllm_engine.check.paged_case import paged_case
from dllm_engine.families import find_family
from dllm_engine.kernels.eviction import mean_query_scores
from dllm_engine.kernels.features import add_features, feature_rows, read_features, write_features
from dllm_engine.kernels.noise import filtered_logits, gumbel, gumbel_max, uniform
from dllm_engine.kernels.paged_attention import paged_attention
from dllm_engine.kernels.rotary import rotary_table, rotate_
from dllm_engine.kernels.similarity import similarity_sums
from dllm_engine.kernels.slots import write_slots
from dllm_engine.kernels.token_statistics import token_statistics
from dllm_engine.kernels.vllm_operators import vllm_kernel
from dllm_engine.kernels.voting import summed_probabilities, voting_scores
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.page_layout import head_dim_of

TYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (16, 64, 96, 128, 256)
"""Checked beside the model's own."""
ROWS, LOGIT_ROWS, VOTERS, POSITIONS, RMS_NORM_EPS = 300, 8, 32, 2048, 1e-5
SPANS = [[2, 100, 32, 250, 102, 32], [0, 70, 0, 70, 290, 10]]
"""Two requests of ``mean_query_scores``, in ``ROWS`` rows."""
PAGED = (([2, 1], [40, 700]), ([4, 3], [70, 33]), ([7, 2], [45, 64]), ([32, 9], [513, 77]), ([40, 17], [600, 41]),
         ([260, 40], [99, 41]))  # fmt: skip
"""Rows of each request, and its tokens in pages: 1, 4 and 7 heads share one; all tiles, with and without splits."""


@dataclass(frozen=True)
class Sizes:
    """Of a model, and of a page."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    slots_per_page: int
    limited: tuple[bool, ...] = (False,)
    """Whether rows have limits in attention: in a guide always, and in a model whose attention goes by blocks where a
    pass feeds several of a request."""

    @classmethod
    def of_model(cls, config: Any, page_size: int = EngineOptions().page_size, num_ranks: int = 1) -> "Sizes":
        """Those of one of ``num_ranks`` tensor-parallel ranks. ``config``: as ``load_config`` gives it."""
        heads, vocab_size = config.num_attention_heads, -(-config.vocab_size // num_ranks)
        kv_heads = max(1, config.num_key_value_heads // num_ranks)
        family = find_family(config.model_type, config.architectures)
        limited = (True,) if family is None else (True, False) if family.attention == "block_causal" else (False,)
        sizes = heads // num_ranks, kv_heads, head_dim_of(config), config.hidden_size, vocab_size
        return cls(*sizes, page_size * kv_heads, limited)

    def with_head_dim(self, head_dim: int) -> "Sizes":
        """Other heads, few of them: four that share two KV heads."""
        slots = self.slots_per_page // self.num_kv_heads * 2
        return replace(self, num_heads=4, num_kv_heads=2, head_dim=head_dim, slots_per_page=slots)

    def with_other_heads(self) -> "list[Sizes]":
        """With each of ``HEAD_DIMS`` but its own."""
        return [self.with_head_dim(head_dim) for head_dim in HEAD_DIMS if head_dim != self.head_dim]

    @property
    def heads(self) -> str:
        return f"{self.num_heads} heads of {self.head_dim} share {self.num_kv_heads}"


class Draw:
    """The same numbers whatever the device: rounded to ``dtype``, held in ``held``."""

    def __init__(self, dtype: torch.dtype, held: torch.dtype, device: torch.device) -> None:
        self.dtype, self.held, self.device = dtype, held, device
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype).to(self.device, self.held)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(self.device)

    def slots(self, places: int, *shape: int) -> torch.Tensor:
        """Different places, and −1 for about a quarter of them."""
        slots = torch.randperm(places, generator=self._generator)[: torch.Size(shape).numel()].view(shape)
        return slots.masked_fill(torch.rand(shape, generator=self._generator) < 0.25, -1).to(self.device)

    def queries_and_keys(self, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        """``ROWS`` rows of a fused projection: views of one tensor."""
        fused = self.normal(ROWS, sizes.num_heads + sizes.num_kv_heads, sizes.head_dim)
        return fused[:, : sizes.num_heads], fused[:, sizes.num_heads :]

    def pool(self, sizes: Sizes, num_slots: int) -> torch.Tensor:
        """Pages of keys and values with at least so many slots of each."""
        return self.normal(-(-num_slots // sizes.slots_per_page) + 2, 2, sizes.slots_per_page, sizes.head_dim)

    def counters(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Seeds, forward passes and positions of the rows of logits."""
        seeds = self.integers(-(2**63), 2**63 - 1, LOGIT_ROWS)
        return seeds, self.integers(0, 500, LOGIT_ROWS), self.integers(0, POSITIONS, LOGIT_ROWS)


# Each function calls one operator, and returns its results and everything that it could write to.
_Case = Callable[[Draw, Sizes], list[torch.Tensor]]


def _write_slots(draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    _, k = draw.queries_and_keys(sizes)
    pool = draw.pool(sizes, k.shape[0] * k.shape[1])
    pages = pool[:, 1]
    write_slots(k, pages, draw.slots(pages.shape[0] * pages.shape[1], *k.shape[:2]))
    return [pool[1:]]


def _similarity_sums(draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    _, k = draw.queries_and_keys(sizes)
    pages = draw.pool(sizes, k.shape[0] * k.shape[1])[:, 1]
    return [similarity_sums(k, pages, draw.slots(pages.shape[0] * pages.shape[1], *k.shape[:2]))]


def _rotate(draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    q, k = draw.queries_and_keys(sizes)
    for rotary_dim in (sizes.head_dim, sizes.head_dim // 4 * 2):  # of a head, and of a part of it
        # A table of the CPU: what is compared is the rotation alone.
        table = rotary_table(POSITIONS, 500_000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)).to(draw.device)
        rotate_(q, draw.integers(0, POSITIONS, ROWS), table)
    return [q, k]


def _mean_query_scores(draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    longest = max(span[3] for span in SPANS)
    scores = mean_query_scores(*draw.queries_and_keys(sizes), torch.tensor(SPANS, device=draw.device), longest)
    return [of_request[: span[3]] for of_request, span in zip(scores, SPANS, strict=True)]


def _over_denominators(operator: Callable[..., torch.Tensor], draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    """Of queries, keys and logarithms of softmax denominators."""
    q, k = draw.queries_and_keys(sizes)
    lse = draw.normal(VOTERS, sizes.num_heads).float() + 6.0  # about that of ROWS scores
    return [operator(q[-VOTERS:], k, lse)]


def _features(draw: Draw, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, rows of features in pages, and slots."""
    per_page = 2 * sizes.slots_per_page * sizes.head_dim // sizes.hidden_size
    if not per_page:
        raise CannotRunError("a page is smaller than a row of features, so no method keeps any")
    rows = feature_rows(draw.pool(sizes, -(-ROWS // per_page) * sizes.slots_per_page), sizes.hidden_size)
    values = draw.normal(ROWS, 2 * sizes.hidden_size)[:, sizes.hidden_size :]
    return values, rows, draw.slots(rows.shape[0] * rows.shape[1], ROWS)


def _add_features(draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    hidden, rows, slots = _features(draw, sizes)
    add_features(hidden, rows, slots)
    return [hidden, rows]


def _write_features(draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    values, rows, slots = _features(draw, sizes)
    write_features(values, rows, slots)
    return [rows]


def _read_features(draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    _, rows, slots = _features(draw, sizes)
    return [read_features(rows, slots)]


def _token_statistics(draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    logits = draw.normal(LOGIT_ROWS, sizes.vocab_size) * 4
    logits[0] = logits[0].round()  # many ties
    logits[1, 3] = 50.0  # the forbidden token is the likeliest
    return [*token_statistics(logits, 3, True, True), *token_statistics(logits, 3, False, False)[:3]]


def _gumbel_max(draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    logits = draw.normal(LOGIT_ROWS, sizes.vocab_size) * 4
    return list(gumbel_max(logits, *draw.counters(), 0, 0.7, 3))


def _filtered_logits(draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    logits = draw.normal(LOGIT_ROWS, sizes.vocab_size) * 4
    logits[0] = logits[0].round()  # many ties
    logits[1, 3] = 50.0  # the forbidden token alone passes
    of_p, of_both = (filtered_logits(logits, 0.7, 0.9, top_k, 3) for top_k in (0, 50))
    # Which token is the last of top-p may be a matter of rounding; what all of them weigh is not.
    return [of_p.logsumexp(dim=-1), of_both.logsumexp(dim=-1), filtered_logits(logits, 0.7, 1.0, 50, 3).clamp(min=-100)]


def _noise(draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    tokens = torch.arange(sizes.vocab_size, device=draw.device)
    counters = *(counter[:, None] for counter in draw.counters()), tokens
    return [uniform(*counters), gumbel(*counters)]


def _paged_attention(draw: Draw, sizes: Sizes, packed: bool, limited: Sequence[bool]) -> list[torch.Tensor]:
    """``packed``: heads have tokens of their own, and a range of slots each."""
    results: list[torch.Tensor] = []
    for seed, (rows, retained) in enumerate(PAGED):
        lengths = [[n - packed * head % 7 * 5 for head in range(sizes.num_kv_heads)] for n in retained]
        case = paged_case(
            rows, lengths, sizes.num_heads, sizes.head_dim, sizes.slots_per_page // sizes.num_kv_heads, packed,
            draw.dtype, seed, draw.device, draw.held,
        )  # fmt: skip
        for attend_fresh, has_limits in itertools.product((True, False), limited):
            limits, lse = case.limits() if has_limits else None, case.q.new_empty(case.q.shape[:2], dtype=torch.float32)
            attend = partial(paged_attention, *case, attend_fresh=attend_fresh, limits=limits)
            results += [attend(lse=lse), lse, attend()]
    return results


# The same of vLLM's operators; without one, the plain version.
_Kernel = Callable[..., None] | None


def _silu_and_mul(kernel: _Kernel, draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    gate_up = draw.normal(ROWS, 2 * sizes.hidden_size)
    gate, up = gate_up.chunk(2, dim=-1)
    if kernel is None:
        return [F.silu(gate) * up]
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    kernel(out, gate_up)
    return [out]


def _rms_norm(kernel: _Kernel, draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    x, weight = draw.normal(ROWS, sizes.hidden_size), draw.normal(sizes.hidden_size)
    if kernel is None:
        return [F.rms_norm(x, weight.shape, weight, RMS_NORM_EPS)]
    out = torch.empty_like(x)
    kernel(out, x, weight, RMS_NORM_EPS)
    return [out]


def _fused_add_rms_norm(kernel: _Kernel, draw: Draw, sizes: Sizes) -> list[torch.Tensor]:
    x, added = draw.normal(2, ROWS, sizes.hidden_size)
    weight = draw.normal(sizes.hidden_size)
    if kernel is None:
        x = (x + added).to(draw.dtype).to(draw.held)
        return [x, F.rms_norm(x, weight.shape, weight, RMS_NORM_EPS)]
    kernel(added, x, weight, RMS_NORM_EPS)
    return [x, added]


_PAGED_CASES = {
    "paged_attention, token-major": partial(_paged_attention, packed=False),
    "paged_attention, ranges per head": partial(_paged_attention, packed=True),
}
_BY_HEADS: dict[str, _Case] = {
    "write_slots": _write_slots,
    "rotate_": _rotate,
    "mean_query_scores": _mean_query_scores,
    "similarity_sums": _similarity_sums,
    "voting_scores": partial(_over_denominators, voting_scores),
    "summed_probabilities": partial(_over_denominators, summed_probabilities),
}
_BY_WIDTH: dict[str, _Case] = {
    "write_features": _write_features,
    "read_features": _read_features,
    "add_features": _add_features,
}
_BY_VOCABULARY: dict[str, _Case] = {
    "token_statistics": _token_statistics,
    "gumbel_max": _gumbel_max,
    "filtered_logits": _filtered_logits,
}
_OF_VLLM = {"silu_and_mul": _silu_and_mul, "rms_norm": _rms_norm, "fused_add_rms_norm": _fused_add_rms_norm}


def _paged_cases(limited: Sequence[bool]) -> dict[str, _Case]:
    return {name: partial(case, limited=limited) for name, case in _PAGED_CASES.items()}


def triton_cases(limited: Sequence[bool]) -> dict[str, _Case]:
    """What the checks run of the operators that have a Triton kernel, by its name."""
    return _paged_cases(limited) | _BY_HEADS | _BY_WIDTH | _BY_VOCABULARY


def operator_checks(
    device: torch.device,
    sizes: Sizes,
    types: Sequence[torch.dtype] = TYPES,
    limited: Sequence[bool] = (True, False),
) -> Iterator[Check]:
    """Every operator in each of the ``types``. ``limited``: with or without limits to attend to pages."""
    yield from head_checks(device, sizes, types, limited)
    yield from _in_each_type(types, device, _BY_WIDTH, sizes, f"rows of {sizes.hidden_size}")
    for name, of_vllm in _OF_VLLM.items():
        for dtype in types:
            run = partial(_compare_vllm, device, name, of_vllm, sizes, dtype)
            yield Check(name, f"{_name(dtype)}, rows of {sizes.hidden_size}", run)
    yield from _in_each_type(types, device, _BY_VOCABULARY, sizes, f"{sizes.vocab_size:,} tokens")
    run = partial(_compare, device, _noise, sizes, torch.float64, torch.float64)
    yield Check("noise", f"{sizes.vocab_size:,} tokens", run)


def head_checks(
    device: torch.device,
    sizes: Sizes,
    types: Sequence[torch.dtype] = TYPES,
    limited: Sequence[bool] = (True, False),
) -> Iterator[Check]:
    """Those that work on heads."""
    yield from _in_each_type(types, device, _paged_cases(limited) | _BY_HEADS, sizes, sizes.heads)


def _in_each_type(
    types: Sequence[torch.dtype], device: torch.device, cases: dict[str, _Case], sizes: Sizes, what: str
) -> Iterator[Check]:
    for name, case in cases.items():
        wide = torch.float64 if name.startswith("paged_attention") else torch.float32
        for dtype in types:
            run = partial(_compare, device, case, sizes, dtype, wide)
            yield Check(name, f"{_name(dtype)}, {what}", run)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare_vllm(
    device: torch.device, name: str, case: Callable[..., list[torch.Tensor]], sizes: Sizes, dtype: torch.dtype
) -> tuple[float, float]:
    current_platform.import_kernels()
    kernel = vllm_kernel(name, device)
    if kernel is None:
        raise CannotRunError(f"this build of vLLM has none for {device.type}")
    plain = case(None, Draw(dtype, torch.float32, torch.device("cpu")), sizes)
    return compare(case(kernel, Draw(dtype, dtype, device), sizes), plain)


def _compare(
    device: torch.device, case: _Case, sizes: Sizes, dtype: torch.dtype, wide: torch.dtype
) -> tuple[float, float]:
    """Of a case in ``dtype`` on the device, and in ``wide`` on the CPU."""
    plain = case(Draw(dtype, wide, torch.device("cpu")), sizes)
    return compare(case(Draw(dtype, dtype, device), sizes), plain)
