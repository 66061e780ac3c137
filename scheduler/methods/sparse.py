"""Sparse-dLLM (arXiv 2508.02558): each layer retains the tokens outside the window that matter most to it."""

from typing import Literal

from pydantic import Field

from dllm_engine.scheduler.methods.base import (
    LAUNCHES_TO_RETAIN,
    CacheMethod,
    ScorerName,
    WindowWidth,
    evict_then_reuse,
    hold_tokens,
)
from dllm_engine.scheduler.request import Blocks, CacheOptions, DecodingSpec, Progress
from dllm_engine.scheduler.step_plan import RefreshState, StepPlan


class SparseOptions(CacheOptions):
    """Options of ``sparse`` (Sparse-dLLM, arXiv 2508.02558). The defaults are the paper's."""

    retention_ratio: float = Field(default=0.5, ge=0, le=1)
    """Share of the candidates (positions outside the window) that a layer retains."""
    pool_kernel_size: WindowWidth = 3
    """Width of the max-pooling over importance scores. Odd; 1 turns it off."""
    update_delay: int = Field(default=1, ge=0)
    """FULL steps of a window before the UPDATE step, which selects what is retained."""
    scorer: ScorerName = "mean_query"
    """How the importance of a token is scored. Scores are averaged over the heads of a layer."""
    observation_window: int = Field(default=32, ge=1)
    """Number of last prompt tokens that vote, for ``scorer="snapkv"``."""
    scope: Literal["bidirectional", "prefix"] = "bidirectional"
    """``bidirectional``: candidates lie on both sides of the window (Algorithm 4). ``prefix``: they lie before the
    window, and everything behind it is retained (Algorithm 5)."""


LAUNCHES = {RefreshState.UPDATE: LAUNCHES_TO_RETAIN[RefreshState.UPDATE] + 8}
"""Score (2), pool, choose, sort, gather and join (2): ``SparsePass``, with its own scorer."""


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Algorithm 4: ``update_delay`` FULL steps, one UPDATE that evicts, then the window alone."""
    assert isinstance(spec.cache, SparseOptions)
    return evict_then_reuse(spec, progress, spec.cache.update_delay, retained(spec, progress.running))


def retained(spec: DecodingSpec, running: Blocks) -> int:
    """The retention ratio of the candidates, rounded down; with ``scope="prefix"`` the suffix is kept whole."""
    options = spec.cache
    assert isinstance(options, SparseOptions)
    start, stop = spec.span_of(running)
    suffix = spec.canvas_length - stop
    if options.scope == "prefix":
        return int(start * options.retention_ratio) + suffix
    return int((start + suffix) * options.retention_ratio)


TUNED = {"retention_ratio": (0.25, 0.5, 0.75), "update_delay": (0, 1)}
SPARSE = CacheMethod(plan, hold_tokens(retained), SparseOptions, recordable=True, launches=LAUNCHES, tuned=TUNED)
