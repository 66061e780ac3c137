"""Formulas of attention and of filters in float64, and the ways to run a Triton kernel.

Other kernels have no test of their own on a CPU: engines are compared with plain
versions, and ``dllm check`` compares each type and device. Triton kernels run on a GPU
where there is one, and under ``TRITON_INTERPRET=1``, which Triton reads when it is
imported, on a CPU. Without either, what a launch would run can still be compiled for a
GPU.
"""

import importlib
import itertools
import os
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dllm_engine.kernels
from dllm_engine.check.cases import Draw, Sizes
from dllm_engine.kernels._operator import Operator

Kernel = Callable[..., Any]
FILTERS = [(1.0, 0), (0.9, 0), (0.5, 7), (0.999, 40), (1e-6, 10_000), (1.0, 1)]
"""Top-p and top-k."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EXACT: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs_triton = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1"
)


def draw(
    dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"
) -> Draw:
    return Draw(Sizes(1, 1, 1, 1, 1), dtype, dtype, device, seed)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


# Attention


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The formula in float64, for the rows of one sequence."""
    k, v = (
        x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v)
    )
    scores = torch.einsum("ihd,jhd->ihj", q.double(), k) * q.shape[-1] ** -0.5
    return torch.einsum("ihj,jhd->ihd", scores.softmax(dim=-1), v)


def bidirectional_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int]
) -> torch.Tensor:
    return torch.cat(
        [
            attention(q[rows], k[rows], v[rows])
            for rows in itertools.starmap(slice, itertools.pairwise(bounds))
        ]
    )


class FlashStandIn:
    """``flash_attn_varlen_func`` a sequence at a time. It refuses arguments that the
    real one would not take.
    """

    __name__ = "flash"

    def __init__(self) -> None:
        self.calls: list[int] = []
        """The number of sequences of each."""

    def __call__(
        self,
        q,
        k,
        v,
        *,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        causal,
        fa_version,
        cu_seqlens_k=None,
        seqused_k=None,
        block_table=None,
    ):
        num_sequences = len(cu_seqlens_q) - 1
        self.calls.append(num_sequences)
        assert (causal, fa_version) == (False, 3)
        assert type(max_seqlen_q) is type(max_seqlen_k) is int
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        for numbers in (
            cu_seqlens_q,
            *([] if seqused_k is None else [seqused_k, block_table]),
        ):
            assert numbers.dtype == torch.int32
            assert numbers.is_contiguous()
        if seqused_k is None:
            assert cu_seqlens_k is cu_seqlens_q
            assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
            return bidirectional_attention(q, k, v, cu_seqlens_q.tolist()).to(q.dtype)
        page_size = k.shape[1]
        assert page_size % 16 == 0
        assert seqused_k.shape == block_table.shape[:1] == (num_sequences,)
        assert (cu_seqlens_q.diff() * (seqused_k > 0)).max() <= max_seqlen_q
        assert seqused_k.max() <= max_seqlen_k
        out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
        for i, length in enumerate(seqused_k.tolist()):
            rows = slice(*cu_seqlens_q[i : i + 2].tolist())
            if length:
                pages = block_table[i, : -(-length // page_size)].long()
                keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
                out[rows] = attention(q[rows], keys, values).to(q.dtype)
        return out


def flash_stand_in(
    monkeypatch: pytest.MonkeyPatch, version: int | None = 3
) -> FlashStandIn:
    """What stands in for FlashAttention, on a GPU that has this version, until the test
    ends.
    """
    from vllm.v1.attention.backends import fa_utils

    stand_in = FlashStandIn()
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size: version)
    # As an operator, so that a fake of CUDA graphs takes it for one kernel.
    flash = Operator(stand_in)
    flash.triton = stand_in
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash, raising=False)
    return stand_in


# Filters


def kept_by_filters(
    logits: torch.Tensor, top_p: float, top_k: int, forbidden_token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(which tokens are kept, the probability of those before each), a row
    at a time.
    """
    kept = torch.ones_like(logits, dtype=torch.bool)
    before = torch.zeros_like(logits, dtype=torch.float64)
    for row, keeps, sums in zip(logits.double(), kept, before, strict=True):
        likeliest = sorted(
            range(len(row)), key=lambda token: -row[token]
        )  # of equal ones the lowest first
        total = 0.0
        for token, probability in zip(
            likeliest, row.softmax(dim=0)[likeliest].tolist(), strict=True
        ):
            sums[token], total = total, total + probability
        if top_p < 1:
            keeps &= sums <= top_p
        if 0 < top_k < len(row):
            keeps &= row >= row[likeliest[top_k - 1]]
        keeps[next(token for token in likeliest if token != forbidden_token)] = True
    return kept, before


def check_filtered_logits(
    filtered_logits: Kernel,
    vocab_size: int,
    top_p: float,
    top_k: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Every token is kept or not as the formula says, but those that rounding may
    decide on.
    """
    logits = draw(dtype, device=device).normal(5, vocab_size + 3)[:, 3:] * 4
    logits[0, : vocab_size // 2] = -torch.inf
    logits[1:3] = logits[1:3].round()  # many ties
    logits[3] = 2.0
    logits[4, 0] = 60.0
    lowest = torch.finfo(torch.float32).min
    for forbidden, temperature in ((-1, 1.7), (0, 0.3)):
        found = filtered_logits(logits, temperature, top_p, top_k, forbidden)
        at_temperature = logits.float() / temperature
        kept, before = kept_by_filters(at_temperature, top_p, top_k, forbidden)
        unsure = (before - top_p).abs() < 1e-5
        assert torch.equal(
            found[~unsure], at_temperature.masked_fill(~kept, lowest)[~unsure]
        )
        assert ((found == at_temperature) | (found == lowest)).all()


# Triton


def all_operators() -> dict[str, Operator]:
    modules = [
        f"dllm_engine.kernels.{module.name}"
        for module in pkgutil.iter_modules(dllm_engine.kernels.__path__)
    ]
    values = [
        value
        for module in modules
        for value in vars(importlib.import_module(module)).values()
    ]
    return {value.name: value for value in values if isinstance(value, Operator)}


class CompilesForCuda:
    """Stands in for a kernel: a launch compiles it for its arguments, as though they
    were on a GPU.
    """

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel, self.capability, self.compiled = kernel, capability, []

    def __getitem__(self, grid: tuple[int, ...]) -> "CompilesForCuda":
        return self

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        options = {
            name: constants.pop(name)
            for name in ("num_warps", "num_stages")
            if name in constants
        }
        constants |= {
            name: x for name, x in zip(names, arguments, strict=False) if x is None
        }
        values = dict(zip(names, arguments, strict=False)) | constants
        types: dict[Any, str] = {
            torch.bfloat16: "*bf16",
            torch.float16: "*fp16",
            torch.float32: "*fp32",
            torch.int32: "*i32",
            torch.int64: "*i64",
            torch.float64: "*fp64",
            int: "i32",
            float: "fp32",
        }
        signature = {
            name: "constexpr"
            if name in constants
            else types[x.dtype if isinstance(x, torch.Tensor) else type(x)]
            for name, x in values.items()
        }
        aligned = [
            parameter.num
            for parameter, x in zip(self.kernel.params, values.values(), strict=True)
            if not (
                parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            )
            and (isinstance(x, torch.Tensor) or (type(x) is int and x % 16 == 0))
        ]
        source = ASTSource(
            self.kernel,
            signature={name: signature[name] for name in names},
            constexprs={(names.index(name),): x for name, x in constants.items()},
            attrs={
                (i,): [["tt.divisibility", 16]]
                for i in aligned
                if names[i] not in constants
            },
        )
        self.compiled.append(
            triton.compile(
                source, target=GPUTarget("cuda", self.capability, 32), options=options
            )
        )

    @property
    def shared_memory(self) -> list[int]:
        return [compiled.metadata.shared for compiled in self.compiled]


def compile_launches(
    monkeypatch: pytest.MonkeyPatch, capability: int = 90
) -> list[CompilesForCuda]:
    """Let the launches of all kernels compile them instead."""
    kernels = []
    for module in {
        importlib.import_module(operator.triton.__module__)
        for operator in all_operators().values()
    }:
        for name in vars(module).copy():
            if name.endswith("_kernel"):
                kernels.append(CompilesForCuda(getattr(module, name), capability))
                monkeypatch.setattr(module, name, kernels[-1])
    return kernels
