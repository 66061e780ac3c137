"""Options of unmasking: the policy that ranks positions, the rule of parallel
unmasking, and token editing.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from pydantic import Field, TypeAdapter, create_model

from dllm_engine.decoding.option_types import CountOrZero, Share
from dllm_engine.decoding.spec import DecodingSpec, ParallelRule, Unmasking
from dllm_engine.decoding.unmasking_policies import (
    CONFIDENCES,
    PARALLEL_RULES,
    UNMASKING_POLICIES,
    WEIGHTED_MEASURES,
    SlowFast,
    UnmaskingPolicy,
    UnmaskingRule,
)
from dllm_engine.families import ModelFamily
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.context import RequestContext, refused
from dllm_engine.request_options.facts import (
    AttentionNeed,
    Exclusion,
    Facts,
    MeasureNeed,
    OptionGroup,
)
from dllm_engine.text import choices

PARALLEL_OPTIONS = tuple(
    name for name, rule in PARALLEL_RULES.items() if rule.option is not None
)
"""Options for parallel unmasking: each has the name of its rule."""
_POST_STEPS = 16
"""Default of ``max_post_steps``, as in the authors' code."""


class PolicyOptions(OptionGroup):
    unmasking: Annotated[
        str | None, Facts(default_by="checkpoint", decided_by_guide=True)
    ] = None
    """Unmasking policy: which masked positions are filled first. With a rule of
    parallel unmasking, the default is the policy that measures what the rule needs."""
    certainty_sigma: Annotated[
        float | None,
        Facts(
            default_by="checkpoint",
            decided_by_guide=True,
            needs_measure=MeasureNeed(
                WEIGHTED_MEASURES, "weights probabilities and margins"
            ),
            needs_decided=True,
        ),
    ] = Field(default=None, ge=0.01, le=1e6)
    """Multiply the confidence of a position by the share of known tokens near it,
    weighted by a Gaussian of this width in tokens (the certainty prior of d2Cache). For
    policies that measure a probability or a margin."""
    alg_temp: Annotated[
        float | None,
        Facts(
            default_by="checkpoint",
            replaces=("rules", "block_add_threshold"),
            decided_by_guide=True,
            needs_measure=MeasureNeed(
                CONFIDENCES, "draws positions by their probability, entropy or margin"
            ),
            needs_decided=True,
            off=0,
        ),
    ] = Field(default=None, ge=0, le=1e6)
    """Draw the positions that a step fills from the softmax of their confidences at
    this temperature. For the same policies, without a rule of parallel
    unmasking. 0: take the most confident."""
    edit_threshold: Annotated[
        Share | None,
        Facts(
            default_by="checkpoint",
            needs_attention=AttentionNeed(
                "block_causal",
                "decided tokens are replaced only in blocks that attend to nothing "
                "behind them",
            ),
            needs_decided=True,
        ),
    ] = None
    """Token editing (LLaDA2.1, arXiv 2602.08676): each step also replaces decided
    tokens of the running block for which it predicts another token with a probability
    above this. A block then ends once a step that began without masks edits nothing. 1:
    no token is replaced. For models with attention by blocks."""
    max_post_steps: Annotated[CountOrZero | None, Facts(default_by="checkpoint")] = None
    """With ``edit_threshold``: steps that a block may take after its last mask. Unset:
    16.
    """


def _facts_of_rule(rule: UnmaskingRule) -> Facts:
    common = Facts(
        default_by="checkpoint",
        one_of="rules",
        replaces=("steps_per_block", "tokens_per_step", "alg_temp"),
        decided_by_guide=True,
        needs_decided=not rule.else_counted,
    )
    if not rule.in_spans:
        return common
    return replace(
        common,
        excludes=(
            Exclusion("steps_per_block", "passes over spans do not count"),
            Exclusion("block_add_threshold", "spans are in one block at a time"),
        ),
        needs_attention=AttentionNeed(
            "full",
            "a block attends to nothing behind it, so that a span leaves nothing out",
        ),
    )


def _rule_fields() -> dict[str, Any]:
    """Fields for the options of rules of parallel unmasking, from the declarations of
    the rules.
    """
    fields = {}
    for name in PARALLEL_OPTIONS:
        rule = PARALLEL_RULES[name]
        kind, *limits = (
            get_args(rule.option)
            if get_origin(rule.option) is Annotated
            else (rule.option,)
        )
        more = Field(description=rule.meaning), _facts_of_rule(rule)
        try:
            annotation = Annotated[kind | None, *limits, *more]  # type: ignore[valid-type]
            TypeAdapter(annotation)
        except Exception as error:
            raise PARALLEL_RULES.error(
                name, f"option={rule.option!r} is not a type with limits: {error}"
            ) from error
        if not rule.meaning:
            raise PARALLEL_RULES.error(name, "the option needs a meaning")
        if not any(map(rule.suits, UNMASKING_POLICIES.values())):
            raise PARALLEL_RULES.error(
                name, f"no unmasking policy measures {rule.measures!r} as it asks"
            )
        fields[name] = annotation, None
    return fields


if TYPE_CHECKING:
    _RuleFields = PolicyOptions
else:
    _RuleFields = create_model("_RuleFields", __base__=PolicyOptions, **_rule_fields())


class UnmaskingOptions(_RuleFields):
    @property
    def rules(self) -> dict[str, Any]:
        """Rules of parallel unmasking that the request sets, with their values."""
        chosen = self.chosen
        return {name: chosen[name] for name in PARALLEL_OPTIONS if name in chosen}


def resolve_unmasking(
    request: RequestContext, own: UnmaskingOptions, options: UnmaskingOptions
) -> Unmasking:
    family = request.family
    policy, parallel = policy_and_rule(options, family)
    edits = options.edit_threshold is not None
    if not edits and own.max_post_steps is not None:
        raise refused(
            f"max_post_steps={own.max_post_steps} counts steps of token editing; set "
            f"edit_threshold, or leave it unset"
        )
    post_steps = options.max_post_steps
    if post_steps is None:
        post_steps = _POST_STEPS
    return Unmasking(
        policy,
        parallel,
        slow_fast=_slow_fast(options, family),
        certainty_sigma=options.certainty_sigma,
        alg_temp=options.alg_temp or 0.0,
        edit_threshold=options.edit_threshold,
        max_post_steps=post_steps if edits else 0,
    )


def policy_and_rule(
    options: UnmaskingOptions, family: ModelFamily
) -> tuple[UnmaskingPolicy, ParallelRule | None]:
    """The request's unmasking policy, and with parallel unmasking the rule. Refuses a
    rule that does not suit the policy."""
    if options.unmasking is not None and options.unmasking not in UNMASKING_POLICIES:
        raise refused(
            f"unmasking={options.unmasking!r} is "
            f"unknown{choices(options.unmasking, UNMASKING_POLICIES)}"
        )
    rule = _rule(options, family)
    policy, rule = _suited(options, family, rule)
    _check_needs(options, policy)
    if options.alg_temp and rule is not None:
        raise refused(
            f"alg_temp={options.alg_temp} draws a fixed count of positions, and "
            f"{rule.kind} counts them by their confidences; leave one of them unset"
        )
    return policy, rule


def _suited(
    options: UnmaskingOptions, family: ModelFamily, rule: ParallelRule | None
) -> tuple[UnmaskingPolicy, ParallelRule | None]:
    """The policy, and the rule if both suit each other."""
    policies = UNMASKING_POLICIES.values()
    policy = UNMASKING_POLICIES[options.unmasking or family.default_unmasking]
    suited = [*policies]
    if rule is not None:
        declared = PARALLEL_RULES[rule.kind]
        suited = [*filter(declared.suits, policies)]
    elif options.certainty_sigma is not None:
        suited = [other for other in policies if other.measures in WEIGHTED_MEASURES]
    if options.unmasking is None and policy not in suited:
        # Choose a policy that measures before or after temperature and filters like the
        # family's default.
        return max(suited, key=lambda other: other.tempered == policy.tempered), rule
    if rule is None or policy in suited:
        return policy, rule
    if declared.else_counted:
        return policy, None
    ((name, value),) = options.rules.items()
    plain = "plain " if declared.untempered else ""
    raise refused(
        f"{name}={value} goes by {plain}{declared.measures}, which "
        f"unmasking={policy.name!r} does not measure; leave unmasking unset or choose "
        f"{' or '.join(other.name for other in suited)}"
    )


def _check_needs(options: OptionGroup, policy: UnmaskingPolicy) -> None:
    """Refuse options whose measure the policy does not have, and with a policy that
    takes tokens back, options that need decided tokens to stay.
    """
    facts = options.facts()
    for name, value in options.effective.items():
        need = facts[name].needs_measure
        if need is not None and policy.measures not in need.measures:
            suited = [
                other.name
                for other in UNMASKING_POLICIES.values()
                if other.measures in need.measures
            ]
            raise refused(
                f"{name}={value} {need.use}, which unmasking={policy.name!r} does not "
                f"measure; choose {' or '.join(suited)}"
            )
        if policy.takes_back and facts[name].needs_decided:
            raise refused(
                f"{name}={value} needs that decided tokens stay, and "
                f"unmasking={policy.name!r} takes them back; leave one of them unset"
            )


def check_taking_back(spec: DecodingSpec, engine: EngineOptions) -> None:
    """Refuse taking tokens back with structured output, and with a cache method that
    keeps the keys and values of decided tokens.
    """
    policy = spec.unmasking.policy
    takers = {
        "decoding='self_speculation'": spec.layout.has_drafts,
        f"unmasking={policy.name!r}": policy.takes_back,
    }
    for taker, takes_back in takers.items():
        if takes_back and spec.text.is_constrained:
            raise refused(
                f"{taker} takes tokens back, which structured output does not allow; "
                f"choose another"
            )
    if policy.takes_back and engine.method.pages is not None:
        raise refused(
            f"unmasking={policy.name!r} takes decided tokens back, but "
            f"cache_method={engine.cache_method!r} keeps what it computed for them; "
            f"choose another policy, or start the engine with cache_method='none'"
        )


def _rule(options: UnmaskingOptions, family: ModelFamily) -> ParallelRule | None:
    """The family's variant of the rule that a request sets."""
    for kind, value in options.rules.items():
        if (slow_fast := _slow_fast(options, family)) is not None:
            value = slow_fast.fast_threshold
        if kind == "entropy_threshold" and family.strict_entropy_threshold:
            kind = "strict_entropy_threshold"
        # As in the authors' code.
        by_blocks = family.attention == "block_causal" and family.whole_blocks
        if kind == "threshold" and (by_blocks or family.exceeds_threshold):
            kind = "exceeded_threshold"
        return ParallelRule(kind, value)
    return None


def _slow_fast(options: UnmaskingOptions, family: ModelFamily) -> SlowFast | None:
    """The request's options of SlowFast sampling, with the family's defaults; None: the
    request has another rule.
    """
    if (chosen := options.rules.get("slow_fast")) is None:
        return None
    return SlowFast.model_validate({**family.slow_fast, **chosen})
