"""Guided Diffusion's choice (arXiv 2505.21467, §3.2.2): which drafts of the diffusion model its guide lets pass.

Plain Python on a few tokens of one request.
"""

from collections.abc import Sequence

from dllm_engine.scheduler.request import Guidance


def agreeing_prefix(ranks: Sequence[int], top_k: int) -> int:
    """Length of the longest prefix of drafts that the guide ranks among its ``top_k`` best."""
    return next((count for count, rank in enumerate(ranks) if rank >= top_k), len(ranks))


def select_guided(
    guidance: Guidance,
    drafts: Sequence[int],
    probabilities: Sequence[float],
    ranks: Sequence[int],
    guided: Sequence[int],
    *,
    first_needed: bool = False,
) -> dict[int, int]:
    """The tokens that a step unmasks, by their index in the window of drafted positions; at least one.

    Args:
        guidance: the request's settings.
        drafts: tokens of the diffusion model, from the leftmost masked position on.
        probabilities: of the drafts, by the diffusion model.
        ranks: how many tokens the guide prefers to each draft.
        guided: the guide's own tokens there.
        first_needed: the first position must be filled now, whatever else is.
    """
    prefix = agreeing_prefix(ranks, guidance.top_k)
    chosen = {i: drafts[i] for i in range(prefix)}
    if guidance.threshold is not None:
        chosen |= {i: drafts[i] for i, p in enumerate(probabilities) if p > guidance.threshold}
    if not chosen or (first_needed and 0 not in chosen):
        chosen[0] = guided[0] if guidance.fallback == "guide" else drafts[0]
    # Selected first, corrected after: what the guide would have said after the uncorrected drafts is final.
    return {i: guided[i] for i in chosen} if guidance.correction else chosen
