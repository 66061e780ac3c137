"""Defaults of request options, from the engine and the checkpoint."""

from collections.abc import Sequence
from typing import Any

from dllm_engine.decoding.unmasking_policies import (
    PARALLEL_RULES,
    UNMASKING_POLICIES,
    UnmaskingPolicy,
)
from dllm_engine.families import FAMILIES, released_defaults
from dllm_engine.options import OPTIONS_KEY, EngineOptions, checkpoint_section
from dllm_engine.request_options.cache import resolve_cache
from dllm_engine.request_options.fields import (
    CHECKPOINT_OPTIONS,
    DEFAULTABLE_OPTIONS,
    FACTS,
    RequestOptions,
    check_exclusions,
    with_defaults,
)
from dllm_engine.request_options.guidance import check_guide
from dllm_engine.request_options.layout import check_suffix
from dllm_engine.request_options.sampling_params import parse_request_options
from dllm_engine.request_options.schedule import check_several_blocks
from dllm_engine.request_options.unmasking import policy_and_rule
from dllm_engine.text import did_you_mean


def check_request_defaults(engine: EngineOptions) -> None:
    """Raise ``ValueError`` if no request could be served with
    ``engine.request_defaults``.
    """
    options = _checked(engine.request_defaults, "request_defaults", DEFAULTABLE_OPTIONS)
    check_suffix(options, engine)
    resolve_cache(options, engine)
    check_guide(options, engine)


def checkpoint_defaults(hf_config: object) -> dict[str, Any]:
    """Request defaults of a checkpoint, from its config.json or else by its name.
    Raises ``ValueError`` if one is wrong.
    """
    section = checkpoint_section(hf_config)
    _checked(section, f"config.json: {OPTIONS_KEY!r}", CHECKPOINT_OPTIONS)
    return with_defaults(section, dict(released_defaults(hf_config)))


def _checked(
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
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    check_exclusions(options)
    for family in FAMILIES.values():
        _, rule = policy_and_rule(options, family)
        check_several_blocks(options, rule)
    return options


def options_with_defaults(
    own: RequestOptions, defaults: dict[str, Any]
) -> RequestOptions:
    """The request's options with the engine's defaults. Defaults that do not go with
    the request's policy are left out; without a policy, with the policies that suit its
    other options.
    """
    options = parse_request_options(with_defaults(own.chosen, defaults))
    policies = [
        policy
        for policy in UNMASKING_POLICIES.values()
        if own.unmasking in (None, policy.name)
    ]
    if own.unmasking is None:
        policies = [
            policy
            for policy in policies
            if all(_goes_with(name, policy) for name in own.effective)
        ]
    left_out = {
        name
        for name in options.chosen
        if not any(_goes_with(name, policy) for policy in policies)
    }
    if options.unmasking not in [policy.name for policy in policies]:
        left_out.add("unmasking")
    return options.model_copy(update=dict.fromkeys(left_out - own.chosen.keys()))


def _goes_with(name: str, policy: UnmaskingPolicy) -> bool:
    """Return True if an option can be combined with a policy."""
    facts = FACTS[name]
    if facts.needs_decided and policy.takes_back:
        return False
    if facts.needs_measure is not None:
        return policy.measures in facts.needs_measure.measures
    return facts.one_of != "rules" or PARALLEL_RULES[name].suits(policy)
