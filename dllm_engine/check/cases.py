"""Test cases of the kernels. Each calls a kernel with random numbers, and returns its
results.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dllm_engine.kernels import (
    attention_scores,
    pages,
    rotary,
    sampling,
    similarity,
    token_statistics,
)
from dllm_engine.kernels.paged_attention import PagedTokens, paged_attention

ROWS = 300
PAGED = (
    ([2, 1], [40, 700]),
    ([4, 3], [70, 33]),
    ([7, 2], [45, 64]),
    ([32, 9], [513, 77]),
    ([40, 17], [600, 41]),
    ([260, 40], [99, 41]),
)
"""Rows of each request, and its tokens in pages: 1, 4 and 7 query heads share a KV
head; all tiles, with and without splits.
"""
Results = list[Tensor]
PagedCase = tuple[Tensor, Tensor, Tensor, Tensor, PagedTokens]


class Sizes(NamedTuple):
    """Sizes of a model, and of its pages."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    page_size: int = 32


class Draw:
    """Random numbers that do not depend on the device, rounded to ``dtype``, in tensors
    of type ``stored``.
    """

    def __init__(
        self,
        sizes: Sizes,
        dtype: torch.dtype,
        stored: torch.dtype,
        device: str,
        seed: int = 0,
    ) -> None:
        self.sizes, self.dtype, self.stored, self.device = sizes, dtype, stored, device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return (
            torch.randn(shape, generator=self.generator)
            .to(self.dtype)
            .to(self.device, self.stored)
        )

    def integers(self, low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=self.generator).to(
            self.device
        )

    def slots(self, pages: Tensor, *shape: int) -> Tensor:
        """Distinct slots of ``pages``, with −1 for about a quarter of them."""
        order = torch.randperm(
            pages.shape[0] * pages.shape[1], generator=self.generator
        )[: torch.Size(shape).numel()]
        return (
            order.view(shape)
            .masked_fill(torch.rand(shape, generator=self.generator) < 0.25, -1)
            .to(self.device)
        )

    def queries_and_keys(self) -> tuple[Tensor, Tensor]:
        """``ROWS`` rows of a fused projection: views of one tensor."""
        fused = self.normal(
            ROWS, self.sizes.num_heads + self.sizes.num_kv_heads, self.sizes.head_dim
        )
        return fused[:, : self.sizes.num_heads], fused[:, self.sizes.num_heads :]


def paged_case(
    draw: Draw, rows: list[int], retained: list[list[int]], packed: bool = False
) -> PagedCase:
    """Arguments of ``paged_attention``: requests of ``rows[r]`` rows and
    ``retained[r][h]`` tokens of KV head h. Slots without a token hold NaN. ``packed``:
    packed layout; else token-major, with gaps."""
    heads, kv_heads, dim, *_, page_size = draw.sizes
    num_slots = page_size * kv_heads
    head_len = torch.tensor(retained, dtype=torch.int32)
    head_start = (
        head_len.cumsum(1) - head_len
        if packed
        else torch.arange(kv_heads).expand_as(head_len)
    )
    stride = torch.full((len(rows),), 1 if packed else kv_heads)
    ends = torch.where(
        head_len > 0, head_start + (head_len - 1) * stride[:, None] + 1, 0
    ).amax(1)
    num_pages = -(-ends // num_slots)
    tables = torch.randperm(
        len(rows) * (int(num_pages.max()) + 1), generator=draw.generator
    ).view(len(rows), -1)
    pool = torch.full(
        (tables.numel(), 2, num_slots, dim),
        torch.nan,
        dtype=draw.stored,
        device=draw.device,
    )
    for request, head in itertools.product(range(len(rows)), range(kv_heads)):
        place = (
            head_start[request, head]
            + torch.arange(retained[request][head]) * stride[request]
        )
        pool[tables[request, place // num_slots], :, place % num_slots] = draw.normal(
            len(place), 2, dim
        )
    tables = tables.masked_fill(
        torch.arange(tables.shape[1]) >= num_pages[:, None], 2**30
    )
    tables, head_start, stride, head_len = (
        x.int().contiguous().to(draw.device)
        for x in (tables, head_start, stride, head_len)
    )
    q, k, v = (
        draw.normal(sum(rows), number, dim) for number in (heads, kv_heads, kv_heads)
    )
    cu_seqlens = torch.tensor(
        [0, *itertools.accumulate(rows)], dtype=torch.int32, device=draw.device
    )
    longest = max(map(max, retained))
    return (
        q,
        k,
        v,
        cu_seqlens,
        PagedTokens(
            pool[:, 0], pool[:, 1], tables, head_start, stride, head_len, longest
        ),
    )


def attend_to_pages(draw: Draw, packed: bool) -> Results:
    results: Results = []
    for rows, retained in PAGED:
        lengths = [
            [n - packed * head % 7 * 5 for head in range(draw.sizes.num_kv_heads)]
            for n in retained
        ]
        case = paged_case(draw, rows, lengths, packed)
        some = draw.integers(0, max(retained) + 99, sum(rows)).int()
        for attend_fresh, limits in itertools.product((True, False), (None, some)):
            lse = torch.empty(
                case[0].shape[:2], dtype=torch.float32, device=draw.device
            )
            attend = partial(
                paged_attention,
                *case,
                attend_fresh=attend_fresh,
                max_seqlen=max(rows),
                limits=limits,
            )
            results += [attend(lse=lse), lse, attend()]
    return results


def use_slots(draw: Draw) -> Results:
    values, keys = (x[:, : draw.sizes.num_kv_heads] for x in draw.queries_and_keys())
    slots_per_page = draw.sizes.page_size * draw.sizes.num_kv_heads
    pool = draw.normal(
        -(-ROWS // draw.sizes.page_size) + 2, 2, slots_per_page, draw.sizes.head_dim
    )
    targets = draw.slots(pool[:, 1], *keys.shape[:2])
    sums = similarity.replace_and_compare(keys, pool[:, 1], targets)
    written = pool[1:, 1].clone()
    pages.write_kv(keys, values, pool[:, 0], pool[:, 1], targets)
    # Of few values, so that many are equal.
    numbers = draw.integers(1, 9, 6 * ROWS).float().view(3, 2, ROWS)
    some = torch.arange(ROWS - 1, -1, -2, device=draw.device)
    pages.write_kv(values[1::2], keys[1::2], pool[:, 0], pool[:, 1], targets, some)
    results = [sums, written, pool[1:]]
    candidates, places = (
        torch.arange(2 * n, device=draw.device).flip(0).view(2, n)
        for n in (ROWS, ROWS // 3)
    )
    for metric in similarity.SIMILARITIES:
        rows, place_of_row = (
            torch.empty_like(x).flatten() for x in (places, candidates)
        )
        similarity.choose_least_similar(
            numbers, metric, candidates, places, rows, place_of_row
        )
        results += rows, place_of_row
    return results


def rotate(draw: Draw) -> Results:
    q, k = draw.queries_and_keys()
    # Rotate a whole head, and a part of it.
    for rotary_dim in (
        draw.sizes.head_dim,
        draw.sizes.head_dim // 4 * 2,
    ):
        frequencies = 500_000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
        table = rotary.rotary_table(2048, frequencies).to(draw.device)
        rotary.rotate_(q, draw.integers(0, 2048, ROWS), table)
        rotary.rotate_(k, draw.integers(0, 2048, 9), table, draw.integers(0, 9, ROWS))
    return [q, k]


def vote(draw: Draw) -> Results:
    q, k = draw.queries_and_keys()
    # About the log of the sum of ROWS exponentials.
    votes = (
        q[-32:],
        k,
        draw.normal(32, draw.sizes.num_heads).float() + 6.0,
    )
    results = [attention_scores.voting_scores(*votes)]
    for rows, lengths in PAGED:
        q, _, _, bounds, tokens = paged_case(
            draw, rows, [[n] * draw.sizes.num_kv_heads for n in lengths]
        )
        lse = draw.normal(*q.shape[:2]).float() + 6.0
        keys = attention_scores.KeysInPages(
            tokens.k_pages, tokens.page_tables, tokens.head_len
        )
        results.append(
            attention_scores.summed_probabilities(
                q, lse, bounds, keys, max(rows) + 3, max(lengths) + 5
            )
        )
    return results


def use_features(draw: Draw) -> Results:
    rows = pages.feature_rows(
        draw.normal(ROWS, 2, draw.sizes.hidden_size, 2), draw.sizes.hidden_size
    )
    hidden, *parts = draw.normal(4, ROWS, draw.sizes.hidden_size)
    places = draw.integers(-ROWS, ROWS, ROWS).clamp(min=-1)
    slots = draw.slots(rows, ROWS)
    computed = pages.ComputedRows(*parts)
    pages.add_or_renew_features(hidden, rows, slots, places, computed)
    return [rows, hidden]


def predict(draw: Draw) -> Results:
    logits = draw.normal(8, draw.sizes.vocab_size) * 4
    # Many ties; the forbidden token is the likeliest.
    logits[0], logits[1, 3] = (
        logits[0].round(),
        50.0,
    )
    counters = sampling.Counters(
        draw.integers(-(2**63), 2**63 - 1, 8), *draw.integers(0, 500, 16).view(2, 8)
    )
    drawn = sampling.gumbel_max(logits, counters, 0, 0.7, 3)
    top_p, both, top_k = (
        sampling.filtered_logits(logits, 0.7, p, k, 3)
        for p, k in ((0.9, 0), (0.9, 50), (1.0, 50))
    )
    # Rounding may decide which token is the last of top-p, but not the total weight of
    # the kept tokens.
    filtered = top_p.logsumexp(dim=-1), both.logsumexp(dim=-1), top_k.clamp(min=-100)
    return [
        *token_statistics.token_statistics(
            logits, 3, with_entropy=True, with_margin=True
        ),
        *drawn,
        *filtered,
    ]


Case = Callable[[Draw], Results]
BY_HEADS: dict[str, Case] = {
    "paged_attention, token-major": partial(attend_to_pages, packed=False),
    "paged_attention, ranges per head": partial(attend_to_pages, packed=True),
    "write_kv, replace_and_compare, choose_least_similar": use_slots,
    "rotate_": rotate,
    "voting_scores, summed_probabilities": vote,
}
"""Cases that depend on head sizes, by the names of their kernels."""
OTHERS: dict[str, Case] = {
    "add_or_renew_features": use_features,
    "token_statistics, gumbel_max, filtered_logits": predict,
}
