"""Options of the guide, and checks of options that guided requests do not have."""

from typing import Annotated, Literal

from pydantic import Field

from dllm_engine.decoding.option_types import Count
from dllm_engine.decoding.spec import Guidance
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.context import RequestContext, refused
from dllm_engine.request_options.facts import Facts, OptionGroup
from dllm_engine.text import shortened

# Setting one of them selects guidance.
_HOW = Facts(default_by="engine", replaces=("guided",))


class GuideOptions(OptionGroup):
    guided: Annotated[bool | None, Facts(default_by="engine", off=False)] = None
    """Let the engine's guide model decide what a step fills (Guided Diffusion).
    Schedules, unmasking policies and rules then have no effect."""
    speculation_length: Annotated[Count | None, _HOW] = None
    """Masked positions that are drafted and checked by the guide in a step, within the
    running block. Unset: 32.
    """
    guide_top_k: Annotated[Count | None, _HOW] = None
    """A draft passes if it is among this many best tokens of the guide. Unset: 1."""
    guide_threshold: Annotated[float | None, _HOW] = Field(default=None, gt=0, lt=1)
    """Also fill every drafted position whose token has a probability above this,
    whether it passes or not. Drafts that pass are filled in any case."""
    guide_fallback: Annotated[Literal["guide", "draft"] | None, _HOW] = None
    """Model whose token fills the first position when no draft passes. Unset: the
    guide.
    """
    guide_correction: Annotated[bool | None, _HOW] = None
    """Fill positions whose drafts pass with the guide's tokens."""


GUIDE_SETTINGS = tuple(name for name in GuideOptions.model_fields if name != "guided")
"""Options about how the guide decides: the fields of ``Guidance``, with ``guide_`` in
front of some.
"""


def check_guide(options: GuideOptions, engine: EngineOptions) -> None:
    """Refuse options about a guide that the engine does not have."""
    if engine.guide_model is not None:
        return
    for name, value in options.effective.items():
        if name in GuideOptions.model_fields:
            raise refused(
                f"{name}={value}: the engine has no guide; start it with guide_model"
            )


def resolve_guidance(
    request: RequestContext, own: GuideOptions, options: GuideOptions
) -> Guidance | None:
    """Settings of the guide for a request; None: the request is not guided."""
    check_guide(options, request.engine)
    if request.engine.guide_model is None:
        return None
    if options.guided is False:
        if named := ", ".join(name for name in GUIDE_SETTINGS if name in own.chosen):
            raise refused(
                f"guided=False and {named} contradict each other; leave one unset"
            )
        return None
    return Guidance(**options.settings(GUIDE_SETTINGS, "guide_"))


def check_guided(request: RequestContext, own: OptionGroup, guidance: Guidance) -> None:
    """Refuse options of a guided request that have no effect with a guide, if the
    request itself sets them.
    """
    facts = own.facts()
    params = request.params
    for name, value in own.effective.items():
        if facts[name].decided_by_guide:
            raise refused(
                f"{name}={value}: the guide decides what a step unmasks; leave it "
                f"unset, or set guided=False"
            )
    asked = "return_order=True" if own.effective.get("return_order") else None
    if params.logprobs is not None:
        asked = f"logprobs={params.logprobs}"
    if asked and (guidance.correction or guidance.fallback == "guide"):
        raise refused(
            f"{asked}: tokens of the guide have no log-probability of the model; leave "
            f"it unset, or set guide_fallback='draft' without guide_correction, or "
            f"guided=False"
        )
    for name in ("logit_bias", "min_tokens"):
        if value := getattr(params, name):
            raise refused(
                f"{name}={shortened(value)}: it is for the model's tokens, not for the "
                f"guide's; leave it unset, or set guided=False"
            )
