r"""Choice of the rows that have changed most since their values were retained (V-verify
of dLLM-Cache, arXiv 2506.06295).

With the fresh values a_{i,h} of row i and KV head h, and the retained values b_{i,h}:

    cosine_i = Σ_h a_{i,h} · b_{i,h} / (max(‖a_i‖, ε) max(‖b_i‖, ε)),   ‖a_i‖² = Σ_h
    a_{i,h} · a_{i,h},   ε = 1e-8 distance_i = ‖a_i − b_i‖² = ‖a_i‖² + ‖b_i‖² − 2 Σ_h
    a_{i,h} · b_{i,h}

All heads of a row are one vector. The three sums are separate from the similarities, so
that tensor-parallel ranks, which hold some heads each, can add their sums first.
"""

from collections.abc import Callable
from operator import itemgetter

import torch
from torch import Tensor

from dllm_engine.kernels._operator import Operator
from dllm_engine.kernels.pages import page_places

EPS = 1e-8
"""ε of ``torch.nn.functional.cosine_similarity``."""
ROUNDING = 1e-6
"""Similarities closer to 1 than this count as 1. Rounding of a vector's float32 product
with itself stays within it.
"""


@Operator
def replace_and_compare(fresh: Tensor, pages: Tensor, slots: Tensor) -> Tensor:
    """Replace retained values by fresh ones. Return the sums that ``SIMILARITIES`` need
    of each row, over the heads of this rank: Σ fresh · retained, Σ fresh², Σ retained²,
    float32 ``[3, num_rows]``.

    Args:
        fresh: ``[num_rows, num_kv_heads, head_dim]``.
        pages: ``[num_pages, slots_per_page, head_dim]``; a page is contiguous, pages
            are whole slots apart.
        slots: the physical slot ``page · slots_per_page + offset`` of the value
            retained for each row and KV head; int64 ``[num_rows, num_kv_heads]``. −1:
            no value is retained. The head is then left out of the row's sums, and is
            not written, or is written to page 0, which belongs to no request. No other
            slot may occur twice.
    """
    kept = (slots >= 0)[..., None]
    places = page_places(slots, pages)
    retained = pages[places]
    pages[places] = fresh
    # Not a product with 0, because slots without a value may hold NaN.
    a, b = (x.where(kept, 0).flatten(1).float() for x in (fresh, retained))
    # All three sums add in the same order, so that unchanged rows get equal sums.
    products = (a * b, a * a, b * b)
    return torch.stack([product.sum(dim=1) for product in products])


def cosine(sums: Tensor) -> Tensor:
    """Cosine similarity of each row, at most 1 − ``ROUNDING``; float32 ``[...,
    num_rows]``, 0 where a vector is 0.

    ``sums`` ``[3, ..., num_rows]``: sums of ``replace_and_compare`` over all heads of
    the model.
    """
    norms = sums[1:].sqrt().clamp_(min=EPS)
    return (sums[0] / (norms[0] * norms[1])).clamp_(max=1 - ROUNDING)


def negative_distance(sums: Tensor) -> Tensor:
    """Minus the squared L2 distance of each row's two vectors, so that a smaller number
    means less similar. Arguments and result as for ``cosine``. 0 where the vectors
    differ only by the rounding of the sums."""
    squares = sums[1] + sums[2]
    distance = squares - 2 * sums[0]
    return -distance.masked_fill(distance <= ROUNDING * squares, 0)


SIMILARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "cosine": cosine,
    "l2": negative_distance,
    "random": itemgetter(0),
}
"""Similarities by the names of dLLM-Cache's metrics (appendix A.5). ``random`` takes
drawn numbers ``[1, ..., num_rows]``.
"""


@Operator
def choose_least_similar(
    sums: Tensor,
    metric: str,
    candidates: Tensor,
    places: Tensor,
    rows: Tensor,
    place_of_row: Tensor,
) -> None:
    """Choose the rows to compute again: the least similar rows of each member of a
    batch.

    Ties go to the first row. Similarities that differ from 1 only by rounding are ties:
    matrix products of different shapes give an unchanged row different last bits.

    Args:
        sums: sums of the candidates, ``[sums, batch, num_candidates]``, for ``metric``,
            which is one of ``SIMILARITIES``.
        candidates: rows to choose from, int64 ``[batch, num_candidates]``; all
            different.
        places: places of the chosen rows, the least similar row first, int64 ``[batch,
            count]``; all different.
        rows: receives the chosen rows at their places, int64.
        place_of_row: receives the place of each chosen row, and −1 for other
            candidates, int64.
    """
    order = SIMILARITIES[metric](sums).sort(stable=True).indices
    chosen = candidates.gather(1, order[:, : places.shape[1]])
    rows[places] = chosen
    place_of_row[candidates] = -1
    place_of_row[chosen] = places
