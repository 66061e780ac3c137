"""Sparse-dLLM (arXiv 2508.02558): each layer retains the tokens outside the window that
matter most to it.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import field_validator, model_validator

from dllm_engine.cache_methods.base import CacheMethod, ScorerName
from dllm_engine.cache_methods.window_refresh import (
    RefreshOptions,
    refresh_then_reuse,
    split,
    whole_is_due,
)
from dllm_engine.decoding.canvas_layout import Blocks, Span
from dllm_engine.decoding.option_types import NotNegative, Positive, Share
from dllm_engine.decoding.page_layout import PageCounts, PageKind, PoolGeometry
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec, EvictingOptions, TunedValues
from dllm_engine.decoding.step_plan import (
    RefreshState,
    Retention,
    StepPlan,
)

RETAINED_PAGES = "retained"
"""Kind of pages that hold retained tokens if prompts are shared."""


class SparseOptions(RefreshOptions, EvictingOptions):
    """Options of ``sparse`` (Sparse-dLLM, arXiv 2508.02558). The defaults are the
    paper's.
    """

    tuned: ClassVar[TunedValues] = {
        "retention_ratio": (0.25, 0.5, 0.75),
        "update_delay": (0, 1),
        "refresh": ("all", "response"),
    }

    refresh: Literal["all", "response"] = "all"
    """Part of the canvas that is computed when the window moves: ``all``, or the
    ``response``. ``response`` still computes the whole canvas once every
    ``prompt_refresh_interval`` blocks."""
    retention_ratio: Share = 0.5
    """Share of the candidates (positions outside the window) that a layer retains."""
    pool_kernel_size: Positive = 3
    """Width of the max-pooling over importance scores. Odd; 1 turns it off."""
    update_delay: NotNegative = 1
    """FULL steps of a window before the UPDATE step, which selects what is retained."""
    scorer: ScorerName = "mean_query"
    """Score of a token's importance, averaged over the heads of a layer."""
    observation_window: Positive = 32
    """Number of last prompt tokens that vote, for ``scorer="snapkv"``."""
    scope: Literal["bidirectional", "prefix"] = "bidirectional"
    """``bidirectional``: candidates lie on both sides of the window (Algorithm 4).
    ``prefix``: they lie before the window, and everything behind it is retained
    (Algorithm 5)."""

    @property
    def unshared(self) -> str | None:
        if self.scorer != "mean_query":
            return f"scorer={self.scorer!r}"
        return None

    @field_validator("pool_kernel_size")
    @classmethod
    def _has_a_middle(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("must be odd, so that the window has a middle")
        return value

    @model_validator(mode="after")
    def _scores_what_is_refreshed(self) -> Self:
        if self.refresh != "all" and self.scorer != "mean_query":
            raise ValueError(
                f"refresh={self.refresh!r} needs scorer='mean_query', since "
                f"scorer={self.scorer!r} looks at the whole canvas; change one of them"
            )
        return self


@dataclass(frozen=True)
class SharingStep:
    """The part of a step plan for engines that share prompts: pages keep the canvas
    before the window in order, and the retained tokens in separate tables.
    """

    reads: str
    """Kind of pages that the step reads."""
    keeps: Span
    """Positions that the step keeps in order."""


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Algorithm 4: ``update_delay`` FULL steps, one UPDATE that evicts, then steps over
    the window.
    """
    update_delay = SparseOptions.of(spec).update_delay
    plan = refresh_then_reuse(spec, progress, update_delay, retain)
    if spec.num_sharable is None:
        return plan
    # The step begins after a shared beginning of the prompt, whose tokens are
    # candidates for retention like all others.
    start = progress.num_shared
    reads = RETAINED_PAGES
    keeps = Span(start, start)
    if progress.step <= update_delay:
        if whole_is_due(spec, progress, update_delay):
            reads = PageKind.KV
        else:
            plan.read -= start
        if plan.adds or start < spec.num_sharable:
            plan.state = RefreshState.UPDATE
            keeps = Span(plan.span.start, plan.window.start)
        before = plan.read if reads == RETAINED_PAGES else 0
        plan.retained = before + sum(retention.count for retention in plan.adds)
    plan.own = SharingStep(reads, keeps)
    return plan


def retain(
    spec: DecodingSpec, window: Span, _: int = 0
) -> tuple[Retention, list[Retention]]:
    """Retained positions: the retention ratio of all candidates, rounded down. With
    ``scope="prefix"`` everything behind the window is retained. The part that only
    whole refreshes renew gets its share, rounded down as well."""
    options, (old, new) = SparseOptions.of(spec), split(spec, window, num_shared=0)
    candidates, behind = (new[:1], new[1:]) if options.scope == "prefix" else (new, ())
    num_candidates = old.size + sum(span.size for span in candidates)
    old_count, count = (
        int(number * options.retention_ratio) for number in (old.size, num_candidates)
    )
    return Retention((old,), old_count), [
        Retention(candidates, count - old_count),
        Retention.whole(*behind),
    ]


def num_retained(spec: DecodingSpec, running: Blocks) -> int:
    old, new = retain(spec, spec.layout.span_of(running))
    return old.count + sum(retention.count for retention in new)


def hold(spec: DecodingSpec, running: Blocks, geometry: PoolGeometry) -> PageCounts:
    """Pages for retained tokens, and if prompts are shared for all tokens before the
    window.
    """
    retained = num_retained(spec, running)
    if spec.num_sharable is None:
        return geometry.uniform(retained)
    start = spec.layout.span_of(running).start
    # The total is that of tokens side by side. It never falls from window to window, so
    # the last window needs the largest reservation.
    together = geometry.kv_pages(start + retained) + 1
    beside = [together - geometry.kv_pages(start)] * geometry.num_layers
    return geometry.uniform(start) | {RETAINED_PAGES: beside}


SPARSE = CacheMethod(
    plan,
    hold,
    SparseOptions,
    "dllm_engine.cache_methods.sparse.layer_pass:SparsePass",
    trims_suffix=True,
    shares_prompts=True,
)
