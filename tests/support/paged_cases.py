"""Random pages and requests for the tests of kernels, and the ways to run a Triton kernel.

Kernels run on a GPU where there is one, and under ``TRITON_INTERPRET=1``, which Triton reads when it is imported, on a
CPU. Without either, what a launch would run can still be compiled for a GPU.
"""

import itertools
import os
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from dllm_engine.kernels.paged_tokens import PagedTokens

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs_triton = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


class PagedCase(NamedTuple):
    """Arguments of ``paged_attention``; every slot without a token holds NaN, unused page ids are no pages."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    tokens: PagedTokens

    def arguments(self, attend_fresh: bool, causal: bool, return_lse: bool, max_seqlen: int | None = None) -> tuple:
        """Of the operator, and so of the kernels of a device."""
        *paged, max_head_len = self.tokens
        return *self[:4], paged, max_head_len, attend_fresh, causal, return_lse, max_seqlen


def paged_case(
    rows: list[int],
    retained: list[list[int]],
    heads: int,
    dim: int,
    page_size: int = 4,
    packed: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> PagedCase:
    """Requests of ``rows[r]`` rows and ``retained[r][h]`` tokens of KV head h, in pages shuffled over one pool.

    ``packed``: a range of slots for each head, one after the other; otherwise token-major, where heads of different
    lengths leave gaps.
    """
    generator = torch.Generator().manual_seed(seed)
    num_kv_heads = len(retained[0])
    slots_per_page = page_size * num_kv_heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    head_len = torch.tensor(retained, dtype=torch.int32)
    if packed:
        head_start = (head_len.cumsum(1) - head_len).int()
        token_stride = torch.ones(len(rows), dtype=torch.int32)
    else:
        head_start = torch.arange(num_kv_heads, dtype=torch.int32).repeat(len(rows), 1)
        token_stride = torch.full((len(rows),), num_kv_heads, dtype=torch.int32)
    ends = torch.where(head_len > 0, head_start + (head_len - 1) * token_stride[:, None] + 1, 0).amax(1)
    num_pages = -(-ends // slots_per_page)
    max_pages = int(num_pages.max()) + 1
    pool = torch.full((int(num_pages.sum()) + 3, 2, slots_per_page, dim), torch.nan, dtype=dtype)
    k_pages, v_pages = pool.unbind(1)
    page_tables = torch.full((len(rows), max_pages), 2**30, dtype=torch.int32)
    free = torch.randperm(len(pool), generator=generator).int()
    for request, count in enumerate(num_pages.tolist()):
        page_tables[request, :count], free = free[:count], free[count:]
        for head, length in enumerate(retained[request]):
            virtual = head_start[request, head] + torch.arange(length) * token_stride[request]
            page, offset = page_tables[request, virtual // slots_per_page].long(), virtual % slots_per_page
            k_pages[page, offset], v_pages[page, offset] = draw(length, dim), draw(length, dim)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    q, k, v = draw(sum(rows), heads, dim), draw(sum(rows), num_kv_heads, dim), draw(sum(rows), num_kv_heads, dim)
    tokens = k_pages, v_pages, page_tables, head_start, token_stride, head_len
    return PagedCase(*(x.to(device) for x in (q, k, v, cu_seqlens)), PagedTokens(*(x.to(device) for x in tokens)))


class CompilesForCuda:
    """Stands in for a kernel: a launch compiles it for its arguments, as though they were on a GPU."""

    def __init__(self, kernel: Any, capability: int = 90) -> None:
        self.kernel, self.capability, self.shared_memory = kernel, capability, []

    def __getitem__(self, grid: tuple[int, ...]) -> "CompilesForCuda":
        return self

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
        values = dict(zip(names, arguments, strict=False)) | constants
        types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
        types |= {torch.int32: "*i32", torch.int64: "*i64"}
        signature = {
            name: "constexpr" if name in constants else types[x.dtype] if isinstance(x, torch.Tensor) else "i32"
            for name, x in values.items()
        }
        aligned = [
            i for i, x in enumerate(values.values()) if isinstance(x, torch.Tensor) or (type(x) is int and x % 16 == 0)
        ]
        source = ASTSource(
            self.kernel,
            signature={name: signature[name] for name in names},
            constexprs={(names.index(name),): x for name, x in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned if names[i] not in constants},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        self.shared_memory.append(compiled.metadata.shared)


def compile_launches(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[CompilesForCuda]:
    """Let the launches of a module's kernels compile them instead."""
    kernels = []
    for name in vars(module).copy():
        if name.endswith("_kernel"):
            kernels.append(CompilesForCuda(getattr(module, name)))
            monkeypatch.setattr(module, name, kernels[-1])
    return kernels
