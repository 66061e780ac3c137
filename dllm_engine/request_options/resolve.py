"""Resolution of a request's parameters, with the defaults of engine, checkpoint and
family, into a ``DecodingSpec``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.sampling_params import SamplingParams

from dllm_engine.cache_methods.page_demand import PageDemand
from dllm_engine.decoding.canvas_layout import CanvasLayout
from dllm_engine.decoding.page_layout import PoolGeometry
from dllm_engine.decoding.spec import (
    CacheOptions,
    DecodingSpec,
    Ends,
    Guidance,
    PackedDecision,
    Reports,
    Sampling,
    Schedule,
    TextPattern,
    Unmasking,
)
from dllm_engine.decoding.unmasking_policies import PARALLEL_RULES, UNMASKING_POLICIES
from dllm_engine.families import FAMILIES, ModelFamily, released_defaults
from dllm_engine.options import (
    OPTIONS_KEY,
    EngineOptions,
    checkpoint_section,
    shortened,
)
from dllm_engine.request_options.fields import (
    CHECKPOINT_OPTIONS,
    COUNT_OPTIONS,
    DEFAULTABLE_OPTIONS,
    END_OPTIONS,
    GUIDE_OPTIONS,
    PARALLEL_OPTIONS,
    RequestOptions,
    with_defaults,
)
from dllm_engine.request_options.resolve_tokens import (
    decision_template,
    response_template,
)
from dllm_engine.request_options.resolve_unmasking import (
    check_attention,
    check_several_blocks,
    resolve_slow_fast,
    resolve_unmasking,
    without_unsuited_defaults,
)
from dllm_engine.request_options.sampling_params import (
    CONSTRAINT,
    DECISION,
    REASONING,
    InvalidRequestError,
    bytes_in,
    parse_request_options,
    request_options,
)
from dllm_engine.text import did_you_mean

_UNGUIDED = (
    *("unmasking", "certainty_sigma", "alg_temp", "delay_eos", "block_add_threshold"),
    *(*COUNT_OPTIONS, *END_OPTIONS, *PARALLEL_OPTIONS),
)
"""Request options about what a step fills, which the guide decides for a guided
request.
"""
_POST_STEPS = 16
"""Default of ``max_post_steps`` (LLaDA2.1's code)."""


def check_request_defaults(engine: EngineOptions) -> None:
    """Raise ``ValueError`` if ``engine.request_defaults`` could serve no request."""
    options = _check_defaults(
        engine.request_defaults, "request_defaults", DEFAULTABLE_OPTIONS
    )
    _resolve_cache(options, engine)
    _check_guide(options, engine)


def checkpoint_defaults(hf_config: object) -> dict[str, Any]:
    """Request defaults of a checkpoint, by its config.json or else its name; raises
    ``ValueError`` if one is wrong.
    """
    section = checkpoint_section(hf_config)
    _check_defaults(section, f"config.json: {OPTIONS_KEY!r}", CHECKPOINT_OPTIONS)
    return with_defaults(section, dict(released_defaults(hf_config)))


def _check_defaults(
    defaults: dict[str, Any], where: str, allowed: Sequence[str]
) -> RequestOptions:
    for name in defaults:
        if name not in allowed:
            raise ValueError(
                f"{where} takes no {name!r}{did_you_mean(name, allowed)} (it may hold "
                f"{', '.join(allowed)})"
            )
    try:
        options = parse_request_options(defaults, "request default")
    except InvalidRequestError as error:
        raise ValueError(f"{where}: {error}") from None
    for family in FAMILIES.values():
        check_several_blocks(options, resolve_unmasking(options, family)[1])
    return options


def _fit(
    options: RequestOptions,
    own: RequestOptions,
    family: ModelFamily,
    prompt_length: int,
    gen_length: int,
) -> tuple[int, int, int]:
    """(block_length, steps, positions). What the request did not name is fitted to its
    response: no block is longer, and each gets a step. Blocks that attention goes by
    may be longer, and add positions behind the response."""
    block_length = options.block_length or family.block_length_of(gen_length)
    begun = added = 0
    if family.attention == "block_causal":
        begun = prompt_length % block_length
        added = -(begun + gen_length) % block_length * family.whole_blocks
    elif own.block_length is None:
        block_length = min(block_length, gen_length)
    elif block_length > gen_length:
        raise InvalidRequestError(
            f"block_length={block_length} is out of range: it must be 1 … gen_length "
            f"(max_tokens), here {gen_length}"
        )
    if family.experts_by_block and block_length != family.attention_block:
        raise InvalidRequestError(
            f"block_length={block_length}: this model chooses experts by blocks of "
            f"{family.attention_block}; leave it unset"
        )
    positions = gen_length + added
    steps = options.steps or positions
    if own.steps is None:
        steps = max(min(steps, positions), -(-(begun + positions) // block_length))
    if steps > positions:
        behind = f" and {added} behind it in its last block" if added else ""
        raise InvalidRequestError(
            f"steps={steps} is out of range: it must be 1 … gen_length (max_tokens), "
            f"here {gen_length}{behind}; a step unmasks at least one token"
        )
    return block_length, steps, positions


def _resolve_cache(options: RequestOptions, engine: EngineOptions) -> CacheOptions:
    """The engine's cache options with what the request lowers; refuses what the cache
    method does not do.
    """
    if options.suffix_blocks is not None and not engine.method.trims_suffix:
        raise InvalidRequestError(
            f"suffix_blocks={options.suffix_blocks}: "
            f"cache_method={engine.cache_method!r} keeps the whole canvas; leave "
            f"suffix_blocks unset, or start the engine with another cache method"
        )
    wanted = options.retention_ratio
    if wanted is None:
        return engine.cache
    allowed = getattr(engine.cache, "retention_ratio", None)
    if allowed is None:
        raise InvalidRequestError(
            f"retention_ratio={wanted}: cache_method={engine.cache_method!r} evicts "
            f"nothing; leave it unset"
        )
    if wanted > allowed:
        raise InvalidRequestError(
            f"retention_ratio={wanted} is out of range: pages are sized for the "
            f"engine's {allowed}, a request may only lower it"
        )
    return engine.cache.model_copy(update={"retention_ratio": wanted})


def _check_guide(options: RequestOptions, engine: EngineOptions) -> None:
    """Refuse options about a guide that the engine does not have."""
    for name in ("guided", *GUIDE_OPTIONS) if engine.guide_model is None else ():
        value = getattr(options, name)
        if value is not None and (name, value) != ("guided", False):
            raise InvalidRequestError(
                f"{name}={value}: the engine has no guide; start it with guide_model"
            )


def _resolve_guidance(
    options: RequestOptions,
    own: RequestOptions,
    params: SamplingParams,
    engine: EngineOptions,
) -> Guidance | None:
    """Settings of the guide for a request; None: the request is not guided. What the
    guide has no use for is refused only where the request itself (``own``) names it."""
    _check_guide(options, engine)
    if engine.guide_model is None:
        return None
    if options.guided is False:
        if named := ", ".join(
            name for name in GUIDE_OPTIONS if getattr(own, name) is not None
        ):
            raise InvalidRequestError(
                f"guided=False and {named} contradict each other; leave one unset"
            )
        return None
    for name in _UNGUIDED:
        value = getattr(own, name)
        if (
            value is not None
            and value is not False
            and (name, value) != ("alg_temp", 0)
        ):
            raise InvalidRequestError(
                f"{name}={value}: the guide decides what a step unmasks; leave it "
                f"unset, or set guided=False"
            )
    given = {
        name: value
        for name in GUIDE_OPTIONS
        if (value := getattr(options, name)) is not None
    }
    guidance = Guidance(
        **{name.removeprefix("guide_"): value for name, value in given.items()}
    )
    asked = "return_order=True" if own.return_order else None
    asked = asked if params.logprobs is None else f"logprobs={params.logprobs}"
    if asked and (guidance.correction or guidance.fallback == "guide"):
        raise InvalidRequestError(
            f"{asked}: tokens of the guide have no log-probability of the model; leave "
            f"it unset, or set guide_fallback='draft' without guide_correction, or "
            f"guided=False"
        )
    for name in ("logit_bias", "min_tokens"):
        if value := getattr(params, name):
            raise InvalidRequestError(
                f"{name}={shortened(value)}: it is for the model's tokens, not for the "
                f"guide's; leave it unset, or set guided=False"
            )
    return guidance


def resolve_decoding(
    params: SamplingParams,
    prompt_length: int,
    family: ModelFamily,
    engine: EngineOptions,
) -> DecodingSpec:
    """Fill in the family's defaults; raises ``InvalidRequestError`` naming the option,
    its value and its range.
    """
    own = request_options(params)
    if own.trace and not engine.trace:
        raise InvalidRequestError(
            "trace=True: the engine records no trace; start it with trace=True "
            "(--trace), or leave it unset"
        )
    if params.max_tokens is None or params.max_tokens < 1:
        raise InvalidRequestError(
            f"gen_length={params.max_tokens} (max_tokens) is out of range: it must be "
            f"at least 1"
        )
    options, guidance, decision = own, None, bytes_in(params, DECISION)
    if decision is not None:
        # Defaults, and a guide, are for generation alone.
        template = decision_template(decision, own, params)
    else:
        if own.passes is not None:
            raise InvalidRequestError(
                f"passes={own.passes} counts the passes of a decision (POST "
                f"/v1/decisions, LLM.decide); leave it unset"
            )
        options = parse_request_options(
            with_defaults(own.model_dump(exclude_none=True), engine.request_defaults)
        )
        options = without_unsuited_defaults(options, own)
        if (guidance := _resolve_guidance(options, own, params, engine)) is not None:
            options = options.model_copy(update=dict.fromkeys(_UNGUIDED))
        template = response_template(own, params.max_tokens)
    gen_length = len(template) or params.max_tokens
    block_length, steps, positions = _fit(
        options, own, family, prompt_length, gen_length
    )
    top_p = params.top_p if options.top_p is None else options.top_p
    top_k = max(params.top_k if options.top_k is None else options.top_k, 0)
    sampler = engine.method.sampler
    if sampler is not None and sampler.only_with_delay_eos and not options.delay_eos:
        sampler = None
    if sampler is not None:
        family = replace(family, schedule="uniform", default_unmasking="low_confidence")
        if params.temperature == 0:
            top_p, top_k = 1.0, 0  # such requests go by the plain probability
    exceeds = sampler is not None and sampler.exceeds_threshold
    unmasking, parallel = resolve_unmasking(options, family, exceeds_threshold=exceeds)
    check_several_blocks(options, parallel)
    check_attention(options, family)
    max_post_steps = (
        _POST_STEPS if options.max_post_steps is None else options.max_post_steps
    )
    if options.edit_threshold is None and own.max_post_steps is not None:
        raise InvalidRequestError(
            f"max_post_steps={max_post_steps} counts steps of token editing; set "
            f"edit_threshold, or leave it unset"
        )
    has_end = bool(params.stop_token_ids) or not params.ignore_eos
    if own.early_stop and not has_end:
        raise InvalidRequestError(
            "early_stop=True: the request has no end token, since ignore_eos=True; set "
            "stop_token_ids, or leave one out"
        )
    scheduled = parallel is None or PARALLEL_RULES[parallel.kind].least_by_schedule
    spec = DecodingSpec(
        layout=CanvasLayout(
            prompt_length,
            gen_length,
            block_length,
            attention=family.attention,
            whole_blocks=family.whole_blocks,
            shifts_logits=family.shifts_logits,
            suffix_blocks=options.suffix_blocks,
            template=template,
            return_given=options.return_given is not False,
        ),
        schedule=Schedule(
            # A rule of parallel unmasking ends a block by itself; what else counts on
            # steps counts a token each.
            steps=steps if parallel is None else positions,
            kind=family.schedule,
            block_steps=options.steps_per_block if scheduled else None,
            tokens_per_step=options.tokens_per_step,
            block_add_threshold=options.block_add_threshold,
        ),
        unmasking=Unmasking(
            policy=UNMASKING_POLICIES[unmasking],
            parallel=parallel,
            slow_fast=resolve_slow_fast(options, family),
            certainty_sigma=options.certainty_sigma,
            alg_temp=options.alg_temp or 0.0,
            edit_threshold=options.edit_threshold,
            max_post_steps=0 if options.edit_threshold is None else max_post_steps,
        ),
        sampling=Sampling(params.temperature, top_p, top_k),
        ends=Ends(
            # A block attends to nothing behind it: giving up what is behind an end
            # token changes nothing before it.
            early_stop=bool(options.early_stop)
            and has_end
            and family.attention == "full",
            delay_eos=bool(options.delay_eos),
            confidence_eos_eot_inf=bool(options.confidence_eos_eot_inf),
            logits_eos_inf=bool(options.logits_eos_inf),
        ),
        text=TextPattern(
            constraint=bytes_in(params, CONSTRAINT),
            reasoning=bytes_in(params, REASONING),
            thinking_budget=params.thinking_token_budget,
        ),
        reports=Reports(
            num_logprobs=params.logprobs,
            return_order=bool(options.return_order),
            streams_steps=options.stream_granularity == "step",
        ),
        cache=_resolve_cache(options, engine),
        guidance=guidance,
        decision=None
        if decision is None
        else PackedDecision(decision, options.passes or 1),
    )
    if engine.method.keeps(spec) and (reason := engine.cache.refusal(spec)):
        raise InvalidRequestError(reason)
    if spec.unmasking.parallel is None and (
        spec.schedule.tokens_per_step or spec.schedule.block_steps
    ):
        schedule = replace(spec.schedule, steps=sum(spec.steps_per_block))
        return replace(spec, schedule=schedule)
    if spec.unmasking.parallel is None and spec.schedule.steps < spec.layout.num_blocks:
        raise InvalidRequestError(
            f"steps={spec.schedule.steps} is out of range: each of the {spec.layout.num_blocks} blocks "
            f"of {block_length} tokens needs at least one; raise steps or block_length"
        )
    return spec


def check_room(
    spec: DecodingSpec,
    engine: EngineOptions,
    max_rows: int,
    geometry: PoolGeometry,
    num_pages: int | None,
) -> None:
    """Refuse a request if a step has no room for its canvas, or for one block where
    steps go in parts, or if the pool could never hold its pages. ``num_pages``: those
    of the pool; None: not known yet."""
    if spec.decision is not None:
        num_rows = spec.layout.canvas_length - (
            spec.layout.blocks_start if engine.method.keeps_for_good else 0
        )
        what, remedy = (
            f"the {num_rows} positions of a decision's pass",
            "shorten the prompt, or ask for fewer fields",
        )
    elif engine.method.shortened is None:
        num_rows, what, remedy = (
            spec.layout.canvas_length,
            f"a canvas of {spec.layout.canvas_length}",
            "shorten prompt or response",
        )
    else:
        num_rows, what, remedy = (
            spec.layout.block_length,
            f"block_length={spec.layout.block_length}",
            "lower block_length",
        )
    if num_rows > max_rows:
        raise InvalidRequestError(
            f"{what}: a step has at most max_num_batched_tokens={max_rows} rows; "
            f"{remedy}, or raise max_num_batched_tokens"
        )
    if (
        num_pages is not None
        and (demand := PageDemand(engine.method, geometry).most(spec)) > num_pages
    ):
        retain_less = (
            "lower retention_ratio, "
            if hasattr(engine.cache, "retention_ratio")
            else ""
        )
        raise InvalidRequestError(
            f"the request needs {demand} pages ({geometry.num_layers} layers, "
            f"page_size {engine.page_size}), the pool has {num_pages}; shorten prompt "
            f"or response, {retain_less}or raise kv_cache_memory_bytes"
        )
