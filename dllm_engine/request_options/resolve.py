"""Resolution of a request's parameters into a ``DecodingSpec``, with the defaults of
engine, checkpoint and family; one call per group of options.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dllm_engine.cache_methods.page_demand import PageDemand
from dllm_engine.decoding.page_layout import PoolGeometry
from dllm_engine.decoding.spec import DecodingSpec, Guidance, TextPattern
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.cache import resolve_cache
from dllm_engine.request_options.context import RequestContext, refused
from dllm_engine.request_options.decision import check_no_decision, resolve_decision
from dllm_engine.request_options.defaults import options_with_defaults
from dllm_engine.request_options.ends import resolve_ends
from dllm_engine.request_options.fields import (
    FACTS,
    RequestOptions,
    check_attention,
    check_exclusions,
)
from dllm_engine.request_options.guidance import check_guided, resolve_guidance
from dllm_engine.request_options.layout import check_suffix, resolve_layout
from dllm_engine.request_options.reports import resolve_reports
from dllm_engine.request_options.sampling import resolve_sampling
from dllm_engine.request_options.sampling_params import (
    CONSTRAINT,
    DECISION,
    HOLE_EDGES,
    REASONING,
    bytes_in,
    request_options,
)
from dllm_engine.request_options.schedule import resolve_schedule
from dllm_engine.request_options.unmasking import (
    check_taking_back,
    resolve_unmasking,
)

if TYPE_CHECKING:  # commands plan requests without importing vLLM
    from vllm.sampling_params import SamplingParams


def resolve_decoding(
    params: "SamplingParams", prompt_length: int, hf_config: Any, engine: EngineOptions
) -> DecodingSpec:
    """Fill in the defaults. Raises ``InvalidRequestError`` naming the option, its value
    and its range.
    """
    if params.max_tokens is None or params.max_tokens < 1:
        raise refused(
            f"gen_length={params.max_tokens} (max_tokens) is out of range: it must be "
            f"at least 1"
        )
    own = request_options(params)
    request = RequestContext(params, prompt_length, hf_config, hf_config.family, engine)
    decision = decided = None
    if (packed := bytes_in(params, DECISION)) is not None:
        # Only generation has defaults and a guide.
        options = own
        guidance = None
        decision, decided = resolve_decision(request, own, packed)
    else:
        options, guidance = _generation(request, own)
    check_exclusions(options)
    layout = resolve_layout(request, own, options, decided)
    conventions = engine.method.conventions
    request = replace(
        request, family=conventions(request.family, bool(options.delay_eos))
    )
    unmasking = resolve_unmasking(request, own, options)
    check_attention(options, request.family)
    check_suffix(options, engine)
    spec = DecodingSpec(
        layout,
        schedule=resolve_schedule(request, own, options, layout, unmasking),
        unmasking=unmasking,
        sampling=resolve_sampling(
            request, options, layout, bytes_in(params, HOLE_EDGES)
        ),
        ends=resolve_ends(request, own, options, layout),
        text=TextPattern(
            constraint=bytes_in(params, CONSTRAINT),
            reasoning=bytes_in(params, REASONING),
            thinking_budget=params.thinking_token_budget,
        ),
        reports=resolve_reports(request, options, layout.return_given),
        cache=resolve_cache(options, engine),
        guidance=guidance,
        decision=decision,
        num_sharable=engine.num_sharable(layout, by_token=decision is not None),
    )
    check_taking_back(spec, engine)
    if engine.method.serves(spec) and (reason := engine.cache.refusal(spec)):
        raise refused(reason)
    return spec


def _generation(
    request: RequestContext, own: RequestOptions
) -> tuple[RequestOptions, Guidance | None]:
    """The options with the engine's defaults, and the settings of the guide."""
    check_no_decision(own)
    options = options_with_defaults(own, request.engine.request_defaults)
    guidance = resolve_guidance(request, own, options)
    if guidance is None:
        return options, None
    check_guided(request, own, guidance)
    decided = [name for name, facts in FACTS.items() if facts.decided_by_guide]
    return options.model_copy(update=dict.fromkeys(decided)), guidance


def check_room(
    spec: DecodingSpec,
    engine: EngineOptions,
    max_rows: int,
    geometry: PoolGeometry,
    num_pages: int | None,
) -> None:
    """Refuse a request if a step has no room for its canvas (or for one block, if steps
    can be split), or if the pool could never hold its pages. ``num_pages``: pages of
    the pool; None: not known yet."""
    if spec.decision is not None:
        num_rows = spec.layout.canvas_length - (
            spec.layout.blocks_start if engine.method.keeps_for_good else 0
        )
        what = f"the {num_rows} positions of a decision's pass"
        remedy = "shorten the prompt, or ask for fewer fields"
    elif engine.method.shortened is None:
        num_rows, what, remedy = (
            spec.layout.canvas_length,
            f"a canvas of {spec.layout.canvas_length}",
            "shorten prompt or response",
        )
    else:
        num_rows, what, remedy = (
            spec.layout.rows_at_once,
            f"block_length={spec.layout.rows_at_once}",
            "lower block_length",
        )
    if num_rows > max_rows:
        raise refused(
            f"{what}: a step has at most max_num_batched_tokens={max_rows} rows; "
            f"{remedy}, or raise max_num_batched_tokens"
        )
    if (
        num_pages is not None
        and (demand := PageDemand(engine.method, geometry).peak(spec)) > num_pages
    ):
        retain_less = (
            "lower retention_ratio, " if engine.retention_ratio is not None else ""
        )
        raise refused(
            f"the request needs {demand} pages ({geometry.num_layers} layers, "
            f"page_size {engine.page_size}), the pool has {num_pages}; shorten prompt "
            f"or response, {retain_less}or raise kv_cache_memory_bytes"
        )
