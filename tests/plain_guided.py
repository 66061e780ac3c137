"""Guided Diffusion as slow, plain PyTorch: every draft by a full forward pass, every check by a fresh causal one.

Readings where the paper leaves room:

* The window is the next ``speculation_length`` masked positions, leftmost first, and never leaves the current block:
  the first one that holds a mask. Decoded positions between them do not count.
* The guide sees the canvas up to the window's last position: decoded tokens where there are any, the draft elsewhere.
  Nothing masked is left of the window, so this is one contiguous text. Position j is judged by the guide's row j - 1.
* The agreeing prefix is that of the drafted positions in order, up to the first that disagrees. Positions which a
  confidence threshold decoded earlier are skipped: they neither extend nor end it.
* A drafted token agrees if fewer than ``top_k`` tokens have a higher logit in the guide's row; of tokens with the same
  logit the lower id ranks first, as in an argmax.
* With ``confidence_threshold`` the window's positions whose draft has a probability strictly above it are selected too.
  The fallback is taken only if nothing at all is selected, so it never competes with a confident draft.
* The fallback unmasks the window's first position, with the guide's argmax ("guide") or the drafted token ("draft").
* Correction replaces every selected token by the guide's argmax, which it computed with the uncorrected draft before
  it. That includes the token of ``fallback="draft"``.
* The guide never predicts the mask token: it could not be told from a position that is still open.
* Dream's block rule and schedules do not apply; its shift does. One vocabulary serves both models, and the prompt is
  not empty (the guide needs a row before the first response token).
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.plain_reference import PlainModel

Guide = Callable[[list[int]], torch.Tensor]
"""Logits ``[len(ids), vocabulary]`` of a causal model: row i predicts token i + 1 from tokens 0 to i."""


def rank(row: torch.Tensor, token: int) -> int:
    """How many tokens come before ``token`` in a row of logits."""
    return int((row > row[token]).sum() + (row[:token] == row[token]).sum())


def agreeing_prefix(drafts: list[int], rows: torch.Tensor, top_k: int) -> int:
    """How many drafts, from the first on, are among the ``top_k`` best of their rows ``[drafts, vocabulary]``."""
    for count, draft in enumerate(drafts):
        if rank(rows[count], draft) >= top_k:
            return count
    return len(drafts)


def select(
    drafts: list[int],
    probabilities: list[float],
    rows: torch.Tensor,
    *,
    top_k: int = 1,
    confidence_threshold: float | None = None,
    fallback: str = "guide",
    correction: bool = False,
) -> dict[int, int]:
    """The tokens that one step unmasks, by index in the window; ``rows`` are the guide's for the drafts."""
    if fallback not in ("guide", "draft"):
        raise ValueError(f"unknown fallback: {fallback}")
    guided = [int(row.argmax()) for row in rows]
    chosen = {i: drafts[i] for i in range(agreeing_prefix(drafts, rows, top_k))}
    if confidence_threshold is not None:
        chosen |= {i: drafts[i] for i in range(len(drafts)) if probabilities[i] > confidence_threshold}
    if not chosen:
        chosen = {0: guided[0] if fallback == "guide" else drafts[0]}
    return {i: guided[i] for i in chosen} if correction else chosen


def plain_guided(
    model: PlainModel,
    guide: Guide,
    prompt_ids: list[int],
    *,
    gen_length: int,
    block_length: int | None = None,
    speculation_length: int = 32,
    top_k: int = 1,
    confidence_threshold: float | None = None,
    fallback: str = "guide",
    correction: bool = False,
) -> dict[str, Any]:
    """Decode with a guide; without ``block_length`` the response is one block.

    The result: ``tokens`` of the response; ``order``, canvas positions unmasked per step; ``forwards`` of the diffusion
    model and ``guide_calls``, one each per step; ``closest``, the smallest relative margin of any decision.
    """
    if not prompt_ids:
        raise ValueError("the guide needs a prompt")
    prompt_length, length = len(prompt_ids), len(prompt_ids) + gen_length
    block_length = block_length or gen_length
    canvas = prompt_ids + [model.mask] * gen_length
    order: list[list[int]] = []
    guide_calls = 0
    closest = math.inf
    while model.mask in canvas[prompt_length:]:
        leftmost = next(position for position in range(prompt_length, length) if canvas[position] == model.mask)
        end = min(leftmost - (leftmost - prompt_length) % block_length + block_length, length)
        window = [position for position in range(leftmost, end) if canvas[position] == model.mask][:speculation_length]

        predictions = model.predictions(canvas)[window]
        drafts = [int(row.argmax()) for row in predictions]
        probabilities = [float(row.softmax(-1)[draft]) for row, draft in zip(predictions, drafts, strict=True)]
        text = canvas[: window[-1] + 1]
        for position, draft in zip(window, drafts, strict=True):
            text[position] = draft
        rows = guide(text)[[position - 1 for position in window]].clone()
        guide_calls += 1
        if model.mask < rows.shape[1]:
            rows[:, model.mask] = -math.inf

        chosen = select(
            drafts,
            probabilities,
            rows,
            top_k=top_k,
            confidence_threshold=confidence_threshold,
            fallback=fallback,
            correction=correction,
        )
        for i, token in chosen.items():
            canvas[window[i]] = token
        order.append(sorted(window[i] for i in chosen))
        if any(token == model.mask for token in chosen.values()):
            raise RuntimeError("the diffusion model drafts its mask token")
        closest = min(closest, _token_margin(predictions, rows, drafts, set(chosen), top_k, fallback, correction))
        if confidence_threshold is not None:
            closest = min([closest, *(_gap(probability, confidence_threshold) for probability in probabilities)])
    return {
        "tokens": canvas[prompt_length:],
        "order": order,
        "forwards": len(order),
        "guide_calls": guide_calls,
        "closest": closest,
    }


def _token_margin(
    predictions: torch.Tensor,
    rows: torch.Tensor,
    drafts: list[int],
    chosen: set[int],
    top_k: int,
    fallback: str,
    correction: bool,
) -> float:
    """How close the closest choice of a token was, of those that this step's outcome depends on."""
    gaps = []
    prefix = agreeing_prefix(drafts, rows, top_k)
    judged = set(range(min(prefix + 1, len(drafts))))
    for i in judged:
        ordered = rows[i].sort(descending=True).values.tolist()
        rival = ordered[top_k] if i < prefix else ordered[top_k - 1]  # the best one left out, or the last one let in
        gaps.append(_gap(float(rows[i, drafts[i]]), rival))
    # The guide is causal: a correction depends on all drafts before it.
    for i in judged | chosen | (set(range(max(chosen))) if correction else set()):
        gaps.append(_gap(*predictions[i].topk(2).values.tolist()))
    if correction or (fallback == "guide" and prefix == 0):
        for i in chosen:
            gaps.append(_gap(*rows[i].topk(2).values.tolist()))
    return min(gaps)


def _gap(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-12) if math.isfinite(a) and math.isfinite(b) else math.inf
