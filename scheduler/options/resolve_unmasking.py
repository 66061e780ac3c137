"""Resolution of a request's options into an unmasking policy and a rule of parallel unmasking."""

from dllm_engine.families import ModelFamily
from dllm_engine.scheduler.options.request_fields import COUNT_OPTIONS, PARALLEL_OPTIONS, RequestOptions, read_slow_fast
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.scheduler.request import ParallelRule
from dllm_engine.scheduler.unmasking_policies import (
    CONFIDENCES,
    PARALLEL_RULES,
    UNMASKING_POLICIES,
    WEIGHTED_MEASURES,
    SlowFast,
)
from dllm_engine.text import choices

_MEASURED = {
    "certainty_sigma": (WEIGHTED_MEASURES, "weights probabilities and margins"),
    "alg_temp": (CONFIDENCES, "draws positions by their probability, entropy or margin"),
    "confidence_eos_eot_inf": (CONFIDENCES, "changes probabilities, entropies and margins"),
}
"""Options that need a policy of certain measures, and what they do with these."""


def resolve_unmasking(options: RequestOptions, family: ModelFamily) -> tuple[str, ParallelRule | None]:
    """The request's unmasking policy and, with parallel unmasking, the rule that goes with it."""
    policy, rule = _policy_and_rule(options, family)
    counts = [f"{name}={value}" for name in COUNT_OPTIONS if (value := getattr(options, name)) is not None]
    if len(counts) > 1:
        raise InvalidRequestError(f"{counts[0]} and {counts[1]} both say how many tokens a step unmasks; give one")
    if options.steps_per_block is not None and options.slow_fast is not None:
        raise InvalidRequestError(
            f"steps_per_block={options.steps_per_block}: with slow_fast, passes do not count; leave one of them unset"
        )
    for name, (measures, what) in _MEASURED.items():
        value = getattr(options, name)
        if value and UNMASKING_POLICIES[policy].measures not in measures:
            suited = [name for name, its in UNMASKING_POLICIES.items() if its.measures in measures]
            raise InvalidRequestError(
                f"{name}={value} {what}, which unmasking={policy!r} does not measure; choose {' or '.join(suited)}"
            )
    if options.alg_temp and rule is not None:
        raise InvalidRequestError(
            f"alg_temp={options.alg_temp} draws a fixed count of positions, and {rule.kind} counts them by their "
            f"confidences; leave one of them unset"
        )
    return policy, rule


def _policy_and_rule(options: RequestOptions, family: ModelFamily) -> tuple[str, ParallelRule | None]:
    if options.unmasking is not None and options.unmasking not in UNMASKING_POLICIES:
        raise InvalidRequestError(
            f"unmasking={options.unmasking!r} is unknown{choices(options.unmasking, UNMASKING_POLICIES)}"
        )
    given = [(name, value) for name in PARALLEL_OPTIONS if (value := getattr(options, name)) is not None]
    if not given:
        return options.unmasking or _default_policy(options, family), None
    slow_fast = resolve_slow_fast(options, family)
    rule = ParallelRule(given[0][0], given[0][1] if slow_fast is None else slow_fast.fast_threshold)
    if len(given) > 1:
        named = " and ".join(f"{kind}={value}" for kind, value in given)
        raise InvalidRequestError(f"{named}: a step unmasks by one rule; give one of {', '.join(PARALLEL_OPTIONS)}")
    if rule.kind == "entropy_threshold" and family.strict_entropy_threshold:
        rule = rule._replace(kind="strict_entropy_threshold")
    if rule.kind == "threshold" and family.attention == "block_causal" and family.whole_blocks:
        rule = rule._replace(kind="exceeded_threshold")  # as SDAR's and LLaDA2's code
    measure, untempered = PARALLEL_RULES[rule.kind].measures, PARALLEL_RULES[rule.kind].untempered
    suited = [policy for policy in UNMASKING_POLICIES.values() if PARALLEL_RULES[rule.kind].suits(policy)]
    if options.unmasking is None:
        default = UNMASKING_POLICIES[family.default_unmasking]
        # The family's own where it suits, else one that like it measures before or after temperature and filters.
        return max(suited, key=lambda policy: (policy is default, policy.tempered == default.tempered)).name, rule
    if UNMASKING_POLICIES[options.unmasking] in suited:
        return options.unmasking, rule
    if PARALLEL_RULES[rule.kind].else_counted:
        return options.unmasking, None
    name, value = given[0]
    raise InvalidRequestError(
        f"{name}={value} goes by {'plain ' if untempered else ''}{measure}, which unmasking={options.unmasking!r} does "
        f"not measure; leave unmasking unset or choose {' or '.join(policy.name for policy in suited)}"
    )


def resolve_slow_fast(options: RequestOptions, family: ModelFamily) -> SlowFast | None:
    """The request's options of SlowFast sampling, with the family's defaults for what it leaves open; None: it decodes
    otherwise."""
    if options.slow_fast is None:
        return None
    return SlowFast.model_validate({**family.slow_fast, **read_slow_fast(options.slow_fast)})


def _default_policy(options: RequestOptions, family: ModelFamily) -> str:
    """The family's own, or one like it that the prior on confidences suits."""
    default = UNMASKING_POLICIES[family.default_unmasking]
    if options.certainty_sigma is None or default.measures in WEIGHTED_MEASURES:
        return default.name
    wanted = "probability", default.tempered
    return next(policy.name for policy in UNMASKING_POLICIES.values() if (policy.measures, policy.tempered) == wanted)
