"""Checks of a kernel against its formula in one case, whose numbers are drawn from a seed.

The kernel is the operator on a CPU, or the function that launches it on a GPU. Inputs are views of larger tensors, and
memory that must not be read holds NaN.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dllm_engine.check.cases import Draw as Numbers
from dllm_engine.check.cases import Sizes
from dllm_engine.check.cases import paged_case as drawn_paged_case
from dllm_engine.kernels.features import feature_rows
from dllm_engine.kernels.noise import gumbel
from dllm_engine.kernels.paged_tokens import PagedTokens
from tests.kernels import formulas
from tests.support.kernels import TOLERANCE, error

Kernel = Callable[..., Any]
ROTATION_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
FILTERS = [(1.0, 0), (0.9, 0), (0.5, 7), (0.999, 40), (1e-6, 10_000), (1.0, 1)]
"""Top-p and top-k."""
EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}


class Draw:
    """Random numbers of one seed, on one device."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype)

    def order(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator).to(self.device)

    def slots(self, places: int, *shape: int, missing: float) -> torch.Tensor:
        """Different places, but −1 for about ``missing`` of them."""
        slots = self.order(places)[: torch.Size(shape).numel()].view(shape)
        slots[torch.rand(shape, generator=self.generator).to(self.device) < missing] = -1
        return slots

    def pages(self, num_pages: int, slots_per_page: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Pages of keys and of values, all NaN."""
        shape = num_pages, 2, slots_per_page, dim
        return torch.full(shape, torch.nan, dtype=dtype, device=self.device).unbind(1)


class PagedCase(NamedTuple):
    """Arguments of ``paged_attention``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    tokens: PagedTokens

    def limits(self) -> torch.Tensor:
        """A limit for each row, from none of its request's keys up to all of them."""
        sizes, generator = self.cu_seqlens.cpu().diff(), torch.Generator().manual_seed(self.q.shape[0])
        most = (self.tokens.head_len.cpu().amax(1) + sizes).repeat_interleave(sizes)
        return (torch.rand(most.shape, generator=generator) * (most + 1)).int().to(self.q.device)

    def arguments(self, attend_fresh: bool, limited: bool, return_lse: bool, max_seqlen: int | None = None) -> Any:
        """Arguments of the function that launches the kernel."""
        paged, max_head_len = list(self.tokens[:6]), self.tokens.max_head_len
        limits = self.limits() if limited else None
        out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        lse = out.new_empty(out.shape[:2], dtype=torch.float32) if return_lse else None
        return out, lse, *self[:4], limits, paged, max_head_len, attend_fresh, max_seqlen


def paged_case(
    rows: list[int], retained: list[list[int]], heads: int, dim: int, page_size: int = 4, packed: bool = False,
    dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu",
) -> PagedCase:  # fmt: skip
    sizes = Sizes(heads, len(retained[0]), dim, hidden_size=0, vocab_size=0, page_size=page_size)
    return PagedCase(*drawn_paged_case(Numbers(sizes, dtype, dtype, device, seed), rows, retained, packed))


def check_paged_attention(attend: Kernel, case: PagedCase, attend_fresh: bool, limited: bool, rtol: float) -> None:
    """``attend`` takes the case, ``attend_fresh``, ``limited`` and whether the second result, lse, is wanted."""
    expected, expected_lse = formulas.paged_attention(*case, attend_fresh, case.limits() if limited else None)
    for return_lse in (True, False):
        out, lse = attend(case, attend_fresh, limited, return_lse)
        assert out.dtype == case.q.dtype
        assert not out.isnan().any()
        assert error(out, expected) < TOLERANCE[case.q.dtype]
        if return_lse:
            assert lse.dtype == torch.float32
            torch.testing.assert_close(lse.double(), expected_lse, rtol=rtol, atol=rtol)


def check_write_slots(
    kernels: tuple[Kernel, Kernel], rows: int, kv_heads: int, slots_per_page: int, missing: float, dtype: torch.dtype,
    seed: int = 0, device: str = "cpu",
) -> None:  # fmt: skip
    """``kernels``: ``write_slots`` and ``write_kv``."""
    write_slots, write_kv = kernels
    draw = Draw(seed, device)
    num_pages = -(-rows * kv_heads // slots_per_page) + 2
    k_pages, v_pages = draw.pages(1 + num_pages, slots_per_page, 24, dtype)
    k, v = draw.normal(rows, 2 * kv_heads, 24, dtype=dtype).split(kv_heads, dim=1)
    slots = draw.slots(num_pages * slots_per_page, rows, kv_heads, missing=missing)
    slots[slots >= 0] += slots_per_page
    expected = [formulas.write_slots(x, pages, slots) for x, pages in ((k, k_pages), (v, v_pages))]
    write_slots(k, k_pages, slots)
    torch.testing.assert_close(k_pages[1:], expected[0][1:], **EXACT)
    k_pages.fill_(torch.nan)
    write_kv(k, v, k_pages, v_pages, slots)
    for pages, expected_pages in zip((k_pages, v_pages), expected, strict=True):
        torch.testing.assert_close(pages[1:], expected_pages[1:], **EXACT)


def check_mean_query_scores(
    mean_query_scores: Kernel, block_rows: int, candidates: int, heads: tuple[int, int], dim: int, dtype: torch.dtype,
    seed: int = 0,
) -> None:  # fmt: skip
    fused = Draw(seed, "cpu").normal(candidates + block_rows, sum(heads), dim, dtype=dtype)
    block, keys = fused[:block_rows, : heads[0]], fused[block_rows:, heads[0] :]
    scores = mean_query_scores(block, keys)
    assert scores.dtype == torch.float32
    # The products are exact in float32 whatever the type of the inputs. The error is relative to the sum of a
    # score's terms without their signs, because a few candidates' terms may cancel to almost nothing.
    expected, unsigned = (formulas.mean_query_scores(*x) for x in ((block, keys), (block.abs(), keys.abs())))
    assert ((scores.double() - expected).abs() <= 1e-6 * unsigned).all()


def check_features(
    kernels: tuple[Kernel, Kernel, Kernel], num_rows: int, width: int, slots_per_page: int, missing: float,
    dtype: torch.dtype, seed: int = 0, device: str = "cpu",
) -> None:  # fmt: skip
    """Rows are written to their slots and nowhere else, read back, and added. ``kernels``: write, read, add."""
    write_features, read_features, add_features = kernels
    draw = Draw(seed, device)
    num_pages = -(-num_rows // (2 * slots_per_page * 8 // width)) + 2
    memory = torch.full((num_pages, 2, slots_per_page, 8), torch.nan, dtype=dtype, device=device)
    rows = feature_rows(memory, width)
    slots = draw.slots(num_pages * rows.shape[1], num_rows, missing=missing)
    values, hidden = draw.normal(num_rows, 2 * width + 3, dtype=dtype)[:, 3:].split(width, dim=1)

    expected = formulas.write_features(values, rows, slots)
    write_features(values, rows, slots)
    torch.testing.assert_close(rows, expected, **EXACT)
    assert int((~memory.isnan()).sum()) == int((slots >= 0).sum()) * width

    torch.testing.assert_close(read_features(rows, slots), values.masked_fill((slots < 0)[:, None], 0), **EXACT)

    hidden[slots < 0] = -0.0
    expected = formulas.add_features(hidden, rows, slots)
    add_features(hidden, rows, slots)
    torch.testing.assert_close(hidden, expected, **EXACT)
    assert bool(hidden[slots < 0].signbit().all())  # not even zero was added


def check_rotate(
    rotate_: Kernel, num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0,
    device: str = "cpu", rotary_dim: int | None = None,
) -> None:  # fmt: skip
    """Rows of one head more than are rotated, as those of a fused projection. The table has 5,000 positions, and holds
    NaN at those that no row is at."""
    draw = Draw(seed, device)
    fused = draw.normal(num_rows, num_heads + 1, head_dim, dtype=dtype)
    positions = torch.randint(5000, (num_rows,), generator=draw.generator)
    rotary_dim = rotary_dim or head_dim
    angles = positions[:, None].double() / 500_000.0 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    cos_sin = torch.full((5000, rotary_dim), torch.nan)
    cos_sin[positions] = torch.cat((angles.cos(), angles.sin()), 1).float()
    positions, cos_sin = positions.to(device), cos_sin.to(device)
    before, x = fused.clone(), fused[:, 1:]
    expected = formulas.rotate_(x, positions, cos_sin)
    rotate_(x, positions, cos_sin)
    assert (x.double() - expected).norm() <= ROTATION_TOLERANCE[dtype] * expected.norm()
    assert fused[:, 0].equal(before[:, 0])
    assert fused[..., rotary_dim:].equal(before[..., rotary_dim:])


def similarity_case(
    rows: int, kv_heads: int, dim: int, slots_per_page: int, missing: float, dtype: torch.dtype = torch.float32,
    seed: int = 0, device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(fresh, pages, slots), with NaN in every slot but those named."""
    draw = Draw(seed, device)
    num_pages = -(-rows * kv_heads // slots_per_page) + 2
    _, pages = draw.pages(num_pages, slots_per_page, dim, dtype)
    slots = draw.slots(num_pages * slots_per_page, rows, kv_heads, missing=missing)
    fresh, retained = draw.normal(rows, 2 * kv_heads, dim, dtype=dtype).split(kv_heads, dim=1)
    kept = slots >= 0
    pages[slots[kept] // slots_per_page, slots[kept] % slots_per_page] = retained[kept]
    return fresh, pages, slots


def check_similarity_sums(similarity_sums: Kernel, **arguments: Any) -> None:
    case = similarity_case(**arguments)
    sums = similarity_sums(*case)
    assert sums.dtype == torch.float32
    # The products are exact in float32 whatever the type of the inputs.
    assert error(sums, formulas.similarity_sums(*case)) < 1e-5


def check_token_statistics(
    token_statistics: Kernel, logits: torch.Tensor, forbidden_token: int, atol: float = 1e-5
) -> None:
    token, *statistics = token_statistics(logits, forbidden_token, True, True)
    expected_token, *expected = formulas.token_statistics(logits, forbidden_token)
    assert torch.equal(token, expected_token)  # ties too: rounded logits have many
    torch.testing.assert_close([x.double() for x in statistics], expected, rtol=1e-5, atol=atol)


def check_gumbel_max(
    gumbel_max: Kernel, vocab_size: int, first_token: int, temperature: float, dtype: torch.dtype, seed: int = 0,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Draws are those of the formula with the counter-based noise, a forbidden token or none."""
    draw = Draw(seed, device)
    logits = draw.normal(7, vocab_size + 3, dtype=dtype)[:, 3:] * 4
    logits[0, : vocab_size // 2] = -torch.inf
    counters = torch.randint(-(2**63), 2**63 - 1, (3, 7), generator=draw.generator).to(device)
    counters[1:] %= 5000
    token_ids = torch.arange(first_token, first_token + vocab_size, device=device)
    scores = logits.float() / temperature + gumbel(*counters[..., None], token_ids)
    for forbidden in (-1, int(scores[3].argmax())):
        scores[:, forbidden] = -torch.inf if forbidden >= 0 else scores[:, forbidden]
        score, column = gumbel_max(logits, *counters, first_token, temperature, forbidden)
        assert torch.equal(column, scores.argmax(dim=1))
        torch.testing.assert_close(score, scores.amax(dim=1), rtol=1e-14, atol=1e-14)


def check_filtered_logits(
    filtered_logits: Kernel, vocab_size: int, top_p: float, top_k: int, dtype: torch.dtype, seed: int = 0,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Every token is kept or not as the formula says, but those that rounding may decide on."""
    logits = Draw(seed, device).normal(7, vocab_size + 3, dtype=dtype)[:, 3:] * 4
    logits[0, : vocab_size // 2] = -torch.inf
    logits[1:3] = logits[1:3].round()  # many ties
    logits[3] = 2.0
    logits[4, 0] = 60.0
    for forbidden, temperature in ((-1, 1.7), (0, 0.3)):
        found = filtered_logits(logits, temperature, top_p, top_k, forbidden)
        at_temperature = logits.float() / temperature
        kept, before = formulas.filtered_logits(at_temperature, top_p, top_k, forbidden)
        expected = at_temperature.masked_fill(~kept, torch.finfo(torch.float32).min)
        unsure = (before - top_p).abs() < 1e-5
        assert torch.equal(found[~unsure], expected[~unsure])
        assert ((found == at_temperature) | (found == torch.finfo(torch.float32).min)).all()


def check_voting(
    kernels: tuple[Kernel, Kernel], voters: int, keys: int, others: int, heads: tuple[int, int], dim: int,
    dtype: torch.dtype, seed: int = 0, device: str = "cpu",
) -> None:  # fmt: skip
    """The last rows of a sequence vote on its first, with ``others`` between them; what lies behind is not read.
    ``kernels``: ``voting_scores`` and ``summed_probabilities``."""
    fused = Draw(seed, device).normal(keys + others + voters, sum(heads), dim, dtype=dtype)
    fused = torch.cat((fused, torch.full_like(fused[:1], torch.nan).expand(99, -1, -1)))[: len(fused)]
    q, k = fused[keys + others :, : heads[0]], fused[:, heads[0] :]
    lse = F.pad(log_sum_exp(q, k), (0, 0, 3, 0), value=torch.nan)[3:]
    scores, sums = (kernel(q, k[:keys], lse) for kernel in kernels)
    assert scores.dtype == sums.dtype == torch.float32
    # The products are exact in float32 whatever the type of the inputs.
    assert error(scores, formulas.voting_scores(q, k[:keys], lse)) < 1e-5
    assert error(sums, formulas.probabilities(q, k[:keys], lse).sum(dim=0)) < 1e-5


def log_sum_exp(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (torch.einsum("ihd,jhd->ihj", q.double(), keys) * q.shape[2] ** -0.5).logsumexp(dim=-1).float()
