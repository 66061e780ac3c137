"""Resolution of a request's options into an unmasking policy, a rule of parallel
unmasking, and token editing.
"""

from dllm_engine.decoding.spec import ParallelRule
from dllm_engine.decoding.unmasking_policies import (
    CONFIDENCES,
    PARALLEL_RULES,
    UNMASKING_POLICIES,
    WEIGHTED_MEASURES,
    SlowFast,
    UnmaskingPolicy,
)
from dllm_engine.families import ModelFamily
from dllm_engine.options import shortened
from dllm_engine.request_options.fields import (
    COUNT_OPTIONS,
    PARALLEL_OPTIONS,
    RequestOptions,
)
from dllm_engine.request_options.sampling_params import InvalidRequestError
from dllm_engine.text import choices

_MEASURED = {
    "certainty_sigma": (WEIGHTED_MEASURES, "weights probabilities and margins"),
    "alg_temp": (
        CONFIDENCES,
        "draws positions by their probability, entropy or margin",
    ),
    "confidence_eos_eot_inf": (
        CONFIDENCES,
        "changes probabilities, entropies and margins",
    ),
}
"""Options that need a policy of certain measures, and what they do with these."""
_NEEDS_LATER_BLOCKS = {
    "response_template": "a block attends to nothing behind it, so that it cannot fill in before given text (template, "
    "suffix)",
    "suffix_blocks": (
        "a block attends to nothing behind it, so that nothing there is computed"
    ),
    "block_add_threshold": (
        "blocks run one at a time; the model was not trained for several"
    ),
    "slow_fast": (
        "a block attends to nothing behind it, so that a span leaves nothing out"
    ),
}
"""Options that need attention to the whole canvas, and why."""


def without_unsuited_defaults(
    options: RequestOptions, own: RequestOptions
) -> RequestOptions:
    """Leave out defaults that do not go with what a request itself (``own``) names: its
    policy, or else the policies that suit its other options."""
    policies = [
        policy
        for policy in UNMASKING_POLICIES.values()
        if own.unmasking in (None, policy.name)
    ]
    suited = {
        name: [policy for policy in policies if policy.measures in measures]
        for name, (measures, _) in _MEASURED.items()
    }
    suited |= {
        kind: list(filter(PARALLEL_RULES[kind].suits, policies))
        for kind in PARALLEL_OPTIONS
    }
    for name in suited if own.unmasking is None else ():
        # False, and a temperature of 0, ask for nothing of ``_MEASURED``; a rule may
        # have a value of 0.
        if (value := getattr(own, name)) is not None and (
            value or name not in _MEASURED
        ):
            policies = [policy for policy in policies if policy in suited[name]]
    left_out = [
        name
        for name in suited
        if not any(policy in suited[name] for policy in policies)
    ]
    if options.unmasking not in [policy.name for policy in policies]:
        left_out.append("unmasking")
    return options.model_copy(
        update={name: None for name in left_out if getattr(own, name) is None}
    )


def resolve_unmasking(
    options: RequestOptions, family: ModelFamily, *, exceeds_threshold: bool = False
) -> tuple[str, ParallelRule | None]:
    """The request's unmasking policy and, with parallel unmasking, the rule that goes
    with it. ``exceeds_threshold``: a ``threshold`` must be exceeded in every family.
    """
    policy, rule = _policy_and_rule(options, family, exceeds_threshold)
    counts = [
        f"{name}={value}"
        for name in COUNT_OPTIONS
        if (value := getattr(options, name)) is not None
    ]
    if len(counts) > 1:
        raise InvalidRequestError(
            f"{counts[0]} and {counts[1]} both say how many tokens a step unmasks; "
            f"give one"
        )
    if options.steps_per_block is not None and "slow_fast" in options.rules:
        raise InvalidRequestError(
            f"steps_per_block={options.steps_per_block}: with slow_fast, passes do not "
            f"count; leave one of them unset"
        )
    for name, (measures, what) in _MEASURED.items():
        value = getattr(options, name)
        if value and policy.measures not in measures:
            suited = [
                each.name
                for each in UNMASKING_POLICIES.values()
                if each.measures in measures
            ]
            raise InvalidRequestError(
                f"{name}={value} {what}, which unmasking={policy.name!r} does not "
                f"measure; choose {' or '.join(suited)}"
            )
    if options.alg_temp and rule is not None:
        raise InvalidRequestError(
            f"alg_temp={options.alg_temp} draws a fixed count of positions, and "
            f"{rule.kind} counts them by their confidences; leave one of them unset"
        )
    return policy.name, rule


def _policy_and_rule(
    options: RequestOptions, family: ModelFamily, exceeds_threshold: bool
) -> tuple[UnmaskingPolicy, ParallelRule | None]:
    if options.unmasking is not None and options.unmasking not in UNMASKING_POLICIES:
        raise InvalidRequestError(
            f"unmasking={options.unmasking!r} is "
            f"unknown{choices(options.unmasking, UNMASKING_POLICIES)}"
        )
    policy = UNMASKING_POLICIES[options.unmasking or family.default_unmasking]
    given = [f"{name}={value}" for name, value in options.rules.items()]
    if len(given) > 1:
        raise InvalidRequestError(
            f"{' and '.join(given)}: a step unmasks by one rule; give one of "
            f"{', '.join(PARALLEL_OPTIONS)}"
        )
    rule = _rule(options, family, exceeds_threshold)
    suited = [*UNMASKING_POLICIES.values()]
    if rule is not None:
        suited = [each for each in suited if PARALLEL_RULES[rule.kind].suits(each)]
    elif options.certainty_sigma is not None:
        suited = [each for each in suited if each.measures in WEIGHTED_MEASURES]
    if options.unmasking is None:
        # The family's own where it suits, else one that like it measures before or
        # after temperature and filters.
        return max(
            suited, key=lambda each: (each is policy, each.tempered == policy.tempered)
        ), rule
    if rule is None or policy in suited:
        return policy, rule
    if PARALLEL_RULES[rule.kind].else_counted:
        return policy, None
    measure = f"{'plain ' if PARALLEL_RULES[rule.kind].untempered else ''}{PARALLEL_RULES[rule.kind].measures}"
    raise InvalidRequestError(
        f"{given[0]} goes by {measure}, which unmasking={policy.name!r} does not "
        f"measure; leave unmasking unset or choose "
        f"{' or '.join(each.name for each in suited)}"
    )


def _rule(
    options: RequestOptions, family: ModelFamily, exceeds_threshold: bool
) -> ParallelRule | None:
    """The rule that a request names, as its family or sampler has it."""
    for kind, value in options.rules.items():
        if (slow_fast := resolve_slow_fast(options, family)) is not None:
            value = slow_fast.fast_threshold
        if kind == "entropy_threshold" and family.strict_entropy_threshold:
            kind = "strict_entropy_threshold"
        # As SDAR's and LLaDA2's code.
        exceeds = family.attention == "block_causal" and family.whole_blocks
        if kind == "threshold" and (exceeds or exceeds_threshold):
            kind = "exceeded_threshold"
        return ParallelRule(kind, value)
    return None


def resolve_slow_fast(options: RequestOptions, family: ModelFamily) -> SlowFast | None:
    """The request's options of SlowFast sampling, with the family's defaults; None: it
    decodes otherwise.
    """
    if (given := options.rules.get("slow_fast")) is None:
        return None
    return SlowFast.model_validate({**family.slow_fast, **given})


def check_several_blocks(
    options: RequestOptions, parallel: ParallelRule | None
) -> None:
    """Refuse what does not go with several blocks: the rule counts a step's positions,
    and a span is in one block.
    """
    if (threshold := options.block_add_threshold) is None:
        return
    for name, reason in (
        ("slow_fast", "SlowFast sampling runs one block at a time"),
        ("steps_per_block", "blocks that run at once share their steps"),
    ):
        if (value := getattr(options, name)) is not None:
            raise InvalidRequestError(
                f"block_add_threshold={threshold} and {name}={value}: {reason}; leave "
                f"one unset"
            )
    if parallel is None:
        raise InvalidRequestError(
            f"block_add_threshold={threshold}: several blocks at once need a rule of "
            f"parallel unmasking; set one of {', '.join(PARALLEL_OPTIONS)}, or leave "
            f"block_add_threshold unset"
        )


def check_attention(options: RequestOptions, family: ModelFamily) -> None:
    """Raise ``InvalidRequestError`` for what the family's attention does not allow."""
    if family.attention == "full":
        if options.edit_threshold is not None:
            raise InvalidRequestError(
                f"edit_threshold={options.edit_threshold}: decided tokens are replaced "
                f"only in models whose attention goes by blocks, and {family.name} "
                f"attends to the whole canvas; leave it unset"
            )
        return
    for name, reason in _NEEDS_LATER_BLOCKS.items():
        if (value := getattr(options, name)) is not None:
            raise InvalidRequestError(
                f"{name}={shortened(value)}: attention of {family.name} goes by "
                f"blocks: {reason}; leave it unset, or use a model that attends to the "
                f"whole canvas"
            )
