"""The formulas of the kernels, written plainly, in float64; what a kernel writes is a copy here."""

import itertools

import torch

from dllm_engine.kernels.paged_tokens import PagedTokens


def bidirectional_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: list[int]) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    out = []
    for start, stop in itertools.pairwise(cu_seqlens):
        qs, ks, vs = (x[start:stop].double().transpose(0, 1) for x in (q, k, v))
        ks, vs = ks.repeat_interleave(group, dim=0), vs.repeat_interleave(group, dim=0)
        scores = qs @ ks.transpose(1, 2) / q.shape[-1] ** 0.5
        out.append((scores.softmax(dim=-1) @ vs).transpose(0, 1))
    return torch.cat(out)


def filtered_logits(
    logits: torch.Tensor, top_p: float, top_k: int, forbidden_token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(which tokens are kept, the probability of those before each), a row at a time."""
    kept = torch.ones_like(logits, dtype=torch.bool)
    before = torch.zeros_like(logits, dtype=torch.float64)
    for row, keeps, sums in zip(logits.double(), kept, before, strict=True):
        likeliest = sorted(range(len(row)), key=lambda token: -row[token])  # of equal ones the lowest first
        total = 0.0
        for token, probability in zip(likeliest, row.softmax(dim=0)[likeliest].tolist(), strict=True):
            sums[token], total = total, total + probability
        if top_p < 1:
            keeps &= sums <= top_p
        if 0 < top_k < len(row):
            keeps &= row >= row[likeliest[top_k - 1]]
        keeps[next(token for token in likeliest if token != forbidden_token)] = True
    return kept, before


def mean_query_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.einsum("hd,jhd->j", q.double().mean(dim=0), keys)


def add_features(hidden: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """A copy of ``hidden``, added to a row at a time."""
    hidden = hidden.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, place = divmod(slot, rows.shape[1])
            hidden[i] = hidden[i] + rows[page, place]
    return hidden


def write_features(values: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """A copy of ``rows``, written a row at a time."""
    rows = rows.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, place = divmod(slot, rows.shape[1])
            rows[page, place] = values[i]
    return rows


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    tokens: PagedTokens,
    attend_fresh: bool,
    limits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), a request and a head at a time."""
    k_pages, v_pages, page_tables, head_start, token_stride, head_len = tokens[:6]
    slots_per_page = k_pages.shape[1]
    group = q.shape[1] // k.shape[1]
    out = q.new_zeros(q.shape, dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for request, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        for head in range(q.shape[1]):
            kv_head = head // group
            numbers = torch.arange(int(head_len[request, kv_head]), device=q.device)
            slots = head_start[request, kv_head] + numbers * token_stride[request]
            where = page_tables[request, slots // slots_per_page].long(), slots % slots_per_page
            keys, values = k_pages[where].double(), v_pages[where].double()
            if attend_fresh:
                keys = torch.cat((keys, k[start:stop, kv_head].double()))
                values = torch.cat((values, v[start:stop, kv_head].double()))
            scores = (q[start:stop, head].double() @ keys.T) * q.shape[-1] ** -0.5
            if limits is not None:
                hidden = torch.arange(len(keys), device=q.device) >= limits[start:stop, None]
                scores = scores.masked_fill(hidden, -torch.inf)
            lse[start:stop, head] = scores.logsumexp(dim=-1)
            weights = (scores - lse[start:stop, head, None]).exp().nan_to_num(0.0)
            out[start:stop, head] = weights @ values
    return out, lse


def rotate_(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin.double()[positions, None].chunk(2, dim=-1)
    first, second = x[..., :rotary_dim].double().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:].double()), dim=-1)


def similarity_sums(fresh: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """A slot at a time."""
    sums = fresh.new_zeros(3, fresh.shape[0], dtype=torch.float64)
    for row, head in (slots >= 0).nonzero().tolist():
        page, offset = divmod(int(slots[row, head]), pages.shape[1])
        a, b = fresh[row, head].double(), pages[page, offset].double()
        sums[:, row] += torch.stack((a @ b, a @ a, b @ b))
    return sums


def token_statistics(
    logits: torch.Tensor, forbidden_token: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits.double()
    allowed = logits.clone()
    if forbidden_token >= 0:
        allowed[:, forbidden_token] = -torch.inf
    token = allowed.argmax(dim=-1)
    p = logits.softmax(dim=-1)
    return (
        token,
        logits.gather(-1, token[:, None])[:, 0],
        logits.logsumexp(dim=-1),
        (p * (p + 1e-10).log()).sum(dim=-1),
        logits.sort(dim=-1, descending=True).values[:, :2],
    )


def voting_scores(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return probabilities(q, k, lse).sum(dim=1).unflatten(0, (k.shape[1], -1)).mean(dim=1)


def probabilities(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """``[num_heads, num_rows, num_keys]``"""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys) * q.shape[2] ** -0.5
    return (scores - lse.double().T[:, :, None]).exp()


def write_slots(values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """A copy of ``pages``, written a slot at a time."""
    pages = pages.clone()
    for row, head in (slots >= 0).nonzero().tolist():
        pages[divmod(int(slots[row, head]), pages.shape[1])] = values[row, head]
    return pages
