"""Options about the tokens that end a response."""

from typing import TYPE_CHECKING, Annotated

from dllm_engine.decoding.canvas_layout import CanvasLayout
from dllm_engine.decoding.spec import Ends, TokenBias
from dllm_engine.decoding.unmasking_policies import CONFIDENCES
from dllm_engine.families import every_end_token, model_end_tokens
from dllm_engine.request_options.context import RequestContext, refused
from dllm_engine.request_options.facts import Facts, MeasureNeed, OptionGroup

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class EndOptions(OptionGroup):
    early_stop: Annotated[
        bool | None, Facts(default_by="checkpoint", needs_decided=True, off=False)
    ] = None
    """Drop everything after the first end token as soon as it is decided, even if
    tokens before it are still masked (d3LLM)."""
    delay_eos: Annotated[
        bool | None, Facts(decided_by_guide=True, needs_decided=True, off=False)
    ] = None
    """Hold back an end token while the position before it is masked and the response
    has no end token yet (ES-dLLM). Works with every cache method. Without a cache, it
    also selects the rest of ES-dLLM's sampler."""
    confidence_eos_eot_inf: Annotated[
        bool | None,
        Facts(
            default_by="checkpoint",
            decided_by_guide=True,
            needs_measure=MeasureNeed(
                CONFIDENCES, "changes probabilities, entropies and margins"
            ),
            off=False,
        ),
    ] = None
    """Fill positions whose predicted token ends the response or a turn after all
    others, and leave these tokens out of all confidences. For policies that measure a
    probability, an entropy or a margin."""
    logits_eos_inf: Annotated[
        bool | None,
        Facts(default_by="checkpoint", decided_by_guide=True, off=False),
    ] = None
    """Never choose an end token, the ``eos_token_id`` of config.json. The
    end of a turn still ends the response."""


def resolve_ends(
    request: RequestContext, own: EndOptions, options: EndOptions, layout: CanvasLayout
) -> Ends:
    params = request.params
    has_end = bool(params.stop_token_ids) or not params.ignore_eos
    if own.early_stop and not has_end:
        raise refused(
            "early_stop=True: the request has no end token, since ignore_eos=True; set "
            "stop_token_ids, or leave one out"
        )
    if params.min_tokens > layout.num_sent:
        raise refused(
            f"min_tokens={params.min_tokens} is out of range: {layout.num_sent} tokens "
            f"come back; it must be 0 … {layout.num_sent}"
        )
    # A block attends to nothing behind it, so dropping what follows an end token
    # changes nothing before it.
    gives_up = layout.attention == "full" and has_end
    ends = end_token_ids(params, request.hf_config)
    earliest = layout.place_of_sent(params.min_tokens)
    barred = []
    if layout.template:
        barred.append(TokenBias.barring(ends, layout.last_given))
    if params.min_tokens:
        # Including end tokens that `ignore_eos` allows, as in vLLM.
        every_end = ends.union(
            every_end_token(request.hf_config), params.all_stop_token_ids
        )
        barred.append(TokenBias.barring(every_end, earliest))
    if options.logits_eos_inf:
        tokens = model_end_tokens(request.hf_config)
        barred.append(TokenBias.barring(tokens, layout.canvas_length))
    least_confident: frozenset[int] = frozenset()
    if options.confidence_eos_eot_inf:
        least_confident = frozenset(every_end_token(request.hf_config))
    return Ends(
        ends,
        earliest,
        early_stop=bool(options.early_stop) and gives_up,
        delay_eos=bool(options.delay_eos),
        barred=tuple(bias for bias in barred if bias.values),
        least_confident=least_confident,
    )


def end_token_ids(params: "SamplingParams", hf_config: object) -> frozenset[int]:
    """Tokens that end a response: the model's (unless ``ignore_eos``) and the request's
    ``stop_token_ids``.
    """
    ends = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        ends.update(every_end_token(hf_config))
        if params.eos_token_id is not None:
            ends.add(params.eos_token_id)
    return frozenset(ends)
