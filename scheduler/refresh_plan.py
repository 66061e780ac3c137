"""Refresh plans: what each cache method computes at each denoising step, and what it holds in pages.

A plan is a pure function of a request's settings and progress; it knows no tensors and no tokens. Where the rows of a
step depend on tokens the plan is symbolic (``RowRule``) with an upper bound, and the model runner resolves it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from dllm_engine.options import (
    DKVOptions,
    DLLMCacheOptions,
    EngineOptions,
    ESDLLMOptions,
    FreeCacheOptions,
    MaskKVOptions,
    SparseOptions,
)
from dllm_engine.scheduler.methods.layer_budgets import layer_budgets
from dllm_engine.scheduler.page_layout import PageCounts, PageKind, PoolGeometry, pages_for
from dllm_engine.scheduler.request import DecodingSpec, Guidance, Progress, Span
from dllm_engine.scheduler.step_plan import RefreshState, RetainedCopy, RowRule, Scope, StepPlan, step_plan


def plan_none(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """No cache: every step is FULL."""
    return step_plan(spec, progress, RefreshState.FULL, Scope.ALL, spec.canvas_span, block_alone=False)


def plan_prefix(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Fast-dLLM's prefix cache: a block's first step keeps what lies before it, the others compute all from it on."""
    retained = retained_prefix(spec, progress.block)
    if progress.step == 0:
        return step_plan(spec, progress, RefreshState.UPDATE, Scope.ALL, spec.canvas_span, retained=retained)
    span = Span(spec.block_span(progress.block).start, spec.canvas_length)
    return step_plan(spec, progress, RefreshState.REUSE, Scope.ACTIVE, span, read=retained, retained=retained)


def plan_dual(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Fast-dLLM's dual cache: a block's first step keeps all but the block, the others compute the block alone."""
    return _plan_eviction(spec, progress, update_step=0, retained=retained_dual(spec, progress.block))


def plan_sparse(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Sparse-dLLM, Algorithm 4: ``update_delay`` FULL steps, one UPDATE that evicts, then the block alone."""
    assert isinstance(spec.cache, SparseOptions)
    return _plan_eviction(spec, progress, spec.cache.update_delay, retained_sparse(spec, progress.block))


def _plan_eviction(spec: DecodingSpec, progress: Progress, update_step: int, retained: int) -> StepPlan:
    if progress.step < update_step:
        return step_plan(spec, progress, RefreshState.FULL, Scope.ALL, spec.canvas_span)
    if progress.step == update_step:
        return step_plan(spec, progress, RefreshState.UPDATE, Scope.ALL, spec.canvas_span, retained=retained)
    span = spec.block_span(progress.block)
    return step_plan(spec, progress, RefreshState.REUSE, Scope.ACTIVE, span, read=retained, retained=retained)


def plan_dkv(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """dKV-Cache-Decode: K/V of a token are kept one step after it was decoded; everything is recomputed now and then.

    LLaDA recomputes all in a block's first two steps, because the second is the first in which a decoded token's
    own K/V could be kept; Dream in the first alone.
    """
    options = spec.cache
    assert isinstance(options, DKVOptions)
    whole = progress.step % options.refresh_interval == 0 or (progress.step == 1 and not spec.shifts_logits)
    state, scope = (RefreshState.UPDATE, Scope.ALL) if whole else (RefreshState.REUSE, Scope.ACTIVE)
    plan = step_plan(spec, progress, state, scope, spec.canvas_span, block_alone=False)
    kept = replace(plan, read=spec.canvas_length, retained=spec.canvas_length)
    if whole:
        return kept
    # With shifted logits the last row predicts no token, so nothing says when it is final; it is taken to be after the
    # second step.
    rows = RowRule.MASKED_BEFORE_AND_LAST if spec.shifts_logits and progress.step == 1 else RowRule.MASKED_BEFORE
    # At most all that was masked when the block began, this block's tokens and those of the blocks after it.
    num_masked = spec.canvas_length - plan.block.start
    return replace(kept, rows=rows, max_rows=num_masked + (rows is RowRule.MASKED_BEFORE_AND_LAST))


def plan_dllm_cache(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """dLLM-Cache, Algorithm 1: prompt and response are recomputed at intervals of their own, counted over the whole
    response (``_due``); between them ``update_ratio`` of the response rows are, chosen per layer. A ratio of 0 reuses
    the response as it is; one that comes to less than a row recomputes none, but still replaces all values."""
    options = spec.cache
    assert isinstance(options, DLLMCacheOptions)
    prompt_due = _due(options.prompt_refresh_interval, spec, progress)
    response_due = _due(options.response_refresh_interval, spec, progress)
    span = spec.canvas_span if prompt_due else Span(live_start(spec), spec.canvas_length)
    state, scope = {
        (True, True): (RefreshState.UPDATE, Scope.ALL),
        (True, False): (RefreshState.UPDATE, Scope.PROMPT),
        (False, True): (RefreshState.UPDATE, Scope.RESPONSE),
        (False, False): (RefreshState.REUSE, Scope.ACTIVE),
    }[prompt_due, response_due]
    plan = step_plan(spec, progress, state, scope, span, block_alone=False)
    plan = replace(plan, read=spec.canvas_length, retained=spec.canvas_length)
    if response_due or options.update_ratio == 0:
        return plan
    return replace(plan, num_updated=int(spec.gen_length * options.update_ratio))


def _due(interval: int, spec: DecodingSpec, progress: Progress) -> bool:
    """Whether an interval of dLLM-Cache, counted over the whole response, begins with this forward pass.

    The methods count passes that each unmask a fixed number of tokens, and what goes stale in between is what those
    tokens change. Where a pass unmasks as many as it may, intervals count the tokens instead; of one token per pass
    both make the same.
    """
    if spec.parallel is None and spec.guidance is None:
        return progress.num_forwards % interval == 0
    before = progress.num_unmasked - progress.last_unmasked
    return progress.num_forwards == 0 or progress.num_unmasked // interval > before // interval


def plan_es_dllm(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """ES-dLLM, by a clock that begins a block at the number of response tokens before it, as if every block took a step
    per token (the authors' code).

    UPDATE of ALL is the whole canvas, the only steps that compute what comes after the block; UPDATE of PROMPT is
    everything up to the block's end; UPDATE of ACTIVE is the block with no row skipped. The others REUSE, and skip. A
    block's first step also feeds what the step before it decoded.
    """
    options = spec.cache
    assert isinstance(options, ESDLLMOptions)
    clock = progress.block * spec.block_length + progress.step
    block_due = clock % options.block_refresh_interval == 0
    copying = RetainedCopy.NONE
    if options.evicts and progress.step >= options.update_delay:
        copying = RetainedCopy.WRITE if progress.step == options.update_delay else RetainedCopy.READ
    rows = spec.predicting_span(progress.block)
    if progress.num_forwards == 0 or (progress.step == 0 and not options.skips):
        plan = step_plan(spec, progress, RefreshState.UPDATE, Scope.ALL, spec.canvas_span, block_alone=False)
    elif clock % options.prompt_refresh_interval == 0:
        plan = step_plan(spec, progress, RefreshState.UPDATE, Scope.PROMPT, Span(0, rows.stop), block_alone=False)
    else:
        whole = block_due or copying is RetainedCopy.WRITE
        state = RefreshState.UPDATE if whole else RefreshState.REUSE
        plan = step_plan(spec, progress, state, Scope.ACTIVE, rows, block_alone=False)
        plan = replace(plan, skips=options.skips and not whole)
        if progress.step == 0:
            longest = rows.stop - spec.predicting_span(progress.block - 1).start
            plan = replace(plan, rows=RowRule.FROM_LAST_UNMASKED, max_rows=longest)
    quota = plan.quota
    if quota.parallel is not None and quota.parallel.kind == "threshold":
        quota = replace(quota, parallel=quota.parallel._replace(kind="exceeded_threshold"))
    num_copied = copied_es_dllm(spec, progress.block) if copying is not RetainedCopy.NONE else 0
    return replace(
        plan,
        quota=quota,
        read=num_copied + rows.size if copying is RetainedCopy.READ else spec.canvas_length,
        retained=spec.canvas_length,
        retained_copy=copying,
        num_copied=num_copied,
    )


def copied_es_dllm(spec: DecodingSpec, block: int) -> int:
    """Tokens outside the block that its retained copy holds."""
    assert isinstance(spec.cache, ESDLLMOptions)
    return int((spec.canvas_length - spec.block_span(block).size) * spec.cache.retention_ratio)


def plan_maskkv(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """MaskKV, Algorithm 1: dLLM-Cache's schedule on what the first pass retained of the prompt. A pass that refreshes
    the prompt alone reuses the response as it is."""
    assert isinstance(spec.cache, MaskKVOptions)
    plan = plan_dllm_cache(spec, progress)
    retained = min(average_budget(spec.cache, spec.prompt_length), spec.prompt_length) + spec.gen_length
    return replace(plan, retained=retained, num_updated=None if plan.scope is Scope.PROMPT else plan.num_updated)


def average_budget(options: MaskKVOptions, prompt_length: int) -> int:
    """Prompt tokens that a KV head of a layer retains, on average; the whole prompt where nothing is evicted."""
    average = int(prompt_length * options.retention_ratio)
    return average if options.kv_budget is None else min(average, options.kv_budget)


@lru_cache(maxsize=256)
def prompt_budgets(options: MaskKVOptions, prompt_length: int, num_layers: int) -> list[int]:
    """Prompt tokens per KV head that each layer retains, on average over its heads."""
    return layer_budgets(
        options.layer_budget,
        average_budget(options, prompt_length),
        options.profile,
        num_layers,
        prompt_length,
        base_share=options.beta,
        redistribute=options.redistribute,
    )


def plan_freecache(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """FreeCache, section 3.2.1: K/V of the prompt and of finished blocks are computed once and kept.

    The first step computes the whole canvas and keeps the prompt. A finished block is fed once more, with its final
    tokens, in the first step of the next one, which keeps it; its last row then predicts that block's first position
    where logits are shifted.
    """
    options = spec.cache
    assert isinstance(options, FreeCacheOptions)
    block, clean = spec.block_span(progress.block), retained_prefix(spec, progress.block)
    stop = spec.canvas_length if options.include_suffix else block.stop
    if progress.step > 0:
        span = Span(block.start, stop)
        return step_plan(spec, progress, RefreshState.REUSE, Scope.ACTIVE, span, read=clean, retained=clean)
    if progress.block == 0:
        return step_plan(spec, progress, RefreshState.UPDATE, Scope.ALL, spec.canvas_span, retained=clean)
    clean_before = retained_prefix(spec, progress.block - 1)
    span = Span(clean_before, stop)
    return step_plan(spec, progress, RefreshState.UPDATE, Scope.ACTIVE, span, read=clean_before, retained=clean)


def live_start(spec: DecodingSpec) -> int:
    """First canvas position whose hidden state every step needs, under dLLM-Cache.

    Hidden states of the prompt are read by nothing but their own later layers, so they need neither features nor
    computing unless the prompt is due (MaskKV's prompt-state exclusion). With shifted logits the last one predicts
    the response's first token.
    """
    assert isinstance(spec.cache, DLLMCacheOptions)
    if not spec.cache.exclude_prompt_states:
        return 0
    return max(spec.prompt_length - spec.shifts_logits, 0)


def retained_prefix(spec: DecodingSpec, block: int) -> int:
    """Tokens before the block."""
    return spec.block_span(block).start


def retained_dual(spec: DecodingSpec, block: int) -> int:
    """Tokens outside the block."""
    return spec.canvas_length - spec.block_span(block).size


def retained_sparse(spec: DecodingSpec, block: int) -> int:
    """The retention ratio of the candidates, rounded down; with ``scope="prefix"`` the suffix is kept whole."""
    options = spec.cache
    assert isinstance(options, SparseOptions)
    start, stop = spec.block_span(block)
    suffix = spec.canvas_length - stop
    if options.scope == "prefix":
        return int(start * options.retention_ratio) + suffix
    return int((start + suffix) * options.retention_ratio)


def _hold_nothing(spec: DecodingSpec, block: int, geometry: PoolGeometry) -> PageCounts:
    return {}


HeldPages = Callable[[DecodingSpec, int, PoolGeometry], PageCounts]


def _hold_tokens(retained: Callable[[DecodingSpec, int], int]) -> HeldPages:
    return lambda spec, block, geometry: geometry.uniform(retained(spec, block))


def _hold_canvas(spec: DecodingSpec, block: int, geometry: PoolGeometry) -> PageCounts:
    return geometry.uniform(spec.canvas_length)


def _hold_canvas_and_features(spec: DecodingSpec, block: int, geometry: PoolGeometry) -> PageCounts:
    return geometry.uniform(spec.canvas_length) | {PageKind.FEATURES: _feature_pages(spec, geometry)}


def _feature_pages(spec: DecodingSpec, geometry: PoolGeometry) -> list[int]:
    """A layer that recomputes every live row in every step needs no features."""
    assert isinstance(spec.cache, DLLMCacheOptions)
    features = [geometry.feature_pages(spec.canvas_length - live_start(spec))] * geometry.num_layers
    return [0, *features[1:]] if spec.cache.refresh_first_layer else features


def _hold_budget_and_features(spec: DecodingSpec, block: int, geometry: PoolGeometry) -> PageCounts:
    """Heads differ in what they retain, and all of a layer's budget may fall to the heads of one rank."""
    assert isinstance(spec.cache, MaskKVOptions)
    heads, slots_per_page = geometry.num_kv_heads, geometry.page_size * geometry.num_kv_heads
    kv = [
        pages_for(
            min(spec.prompt_length * heads, budget * geometry.total_kv_heads) + spec.gen_length * heads, slots_per_page
        )
        for budget in prompt_budgets(spec.cache, spec.prompt_length, geometry.num_layers)
    ]
    return {PageKind.KV: kv, PageKind.FEATURES: _feature_pages(spec, geometry)}


def _hold_es_dllm(spec: DecodingSpec, block: int, geometry: PoolGeometry) -> PageCounts:
    """The whole canvas, the copy of what is retained with the block, and where rows are dropped the features of those
    that predict the response: no other row is ever in a step that skips."""
    options = spec.cache
    assert isinstance(options, ESDLLMOptions)
    counts = geometry.uniform(spec.canvas_length)
    cuts = options.cuts(geometry.num_layers)
    if options.keeps_features and cuts:
        pages = geometry.feature_pages(spec.gen_length)
        counts[PageKind.FEATURES] = [pages if layer in cuts else 0 for layer in range(geometry.num_layers)]
    if options.evicts:
        copied = copied_es_dllm(spec, block) + spec.block_span(block).size
        counts[PageKind.RETAINED] = [geometry.kv_pages(copied)] * geometry.num_layers
    return counts


@dataclass(frozen=True)
class RefreshPlan:
    """A cache method, as the scheduler sees it."""

    plan: Callable[[DecodingSpec, Progress], StepPlan]
    """The next step of a request."""
    pages: HeldPages
    """Pages that a request holds once a step of the given block has written them. Known before anything runs, so that
    they can be reserved."""


REFRESH_PLANS: dict[str, RefreshPlan] = {
    "none": RefreshPlan(plan_none, _hold_nothing),
    "prefix": RefreshPlan(plan_prefix, _hold_tokens(retained_prefix)),
    "dual": RefreshPlan(plan_dual, _hold_tokens(retained_dual)),
    "sparse": RefreshPlan(plan_sparse, _hold_tokens(retained_sparse)),
    "dkv": RefreshPlan(plan_dkv, _hold_canvas),
    "dllm_cache": RefreshPlan(plan_dllm_cache, _hold_canvas_and_features),
    "es_dllm": RefreshPlan(plan_es_dllm, _hold_es_dllm),
    "maskkv": RefreshPlan(plan_maskkv, _hold_budget_and_features),
    "freecache": RefreshPlan(plan_freecache, _hold_tokens(retained_prefix)),
}


def guide_pages(spec: DecodingSpec, geometry: PoolGeometry) -> PageCounts:
    """Pages that the guide takes for a request, all its life. It is never asked what follows the last token."""
    return geometry.guide_pages(spec.canvas_length - 1) if spec.guidance is not None else {}


def page_demand(spec: DecodingSpec, options: EngineOptions, geometry: PoolGeometry) -> int:
    """The most pages a request holds at any time of its life."""
    return max(_pages_held(spec, block, options, geometry) for block in range(spec.num_blocks))


def _pages_held(spec: DecodingSpec, block: int, options: EngineOptions, geometry: PoolGeometry) -> int:
    held = REFRESH_PLANS[options.cache_method].pages(spec, block, geometry) | guide_pages(spec, geometry)
    return sum(map(sum, held.values()))


def longest_demand(options: EngineOptions, geometry: PoolGeometry, max_model_len: int) -> int:
    """The most pages that a request of ``max_model_len`` can need, whatever its prompt, response and block length.

    Demand grows with the canvas, and evenly from prompt to response and with the block, so the extremes bound it.
    Raises ``ValueError`` where the pool's pages do not suit the method.
    """
    cache = options.cache
    if isinstance(cache, MaskKVOptions):
        # A share of one prompt token is none, while of a few a layer, or the heads of a rank, may retain them all.
        cache = cache.model_copy(update={"retention_ratio": 1.0})

    def demand(gen_length: int, block_length: int) -> int:
        spec = DecodingSpec(
            prompt_length=max_model_len - gen_length,
            gen_length=gen_length,
            block_length=block_length,
            steps=gen_length,
            schedule="uniform",
            unmasking="low_confidence",
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            shifts_logits=True,
            guidance=Guidance() if options.guide_model else None,
            cache=cache,
        )
        return max(_pages_held(spec, block, options, geometry) for block in {0, spec.num_blocks - 1})

    longest = max(max_model_len - 1, 1)
    return max(demand(1, 1), demand(longest, 1), demand(longest, longest))
