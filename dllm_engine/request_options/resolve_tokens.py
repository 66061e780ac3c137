"""Parameters of a request about single tokens, in a model's vocabulary."""

import math
from dataclasses import replace

from vllm.sampling_params import SamplingParams

from dllm_engine.constraints.decision import unpacked_decision
from dllm_engine.decoding.spec import DecodingSpec, TokenBias
from dllm_engine.families import barred_tokens, every_end_token, model_end_tokens
from dllm_engine.request_options.fields import RequestOptions
from dllm_engine.request_options.sampling_params import InvalidRequestError

MOST_BIASES = 8192
"""As many are checked, sent and added in milliseconds."""
LARGEST_BIAS = 1e4
"""More than logits differ by; added to one, float32 still tells tokens apart."""
_UNUSED = {
    "temperature": 0.0,
    "min_tokens": 0,
    "logit_bias": None,
    "structured_outputs": None,
}
"""Parameters without a meaning for a decision, whose distribution is the model's."""


def response_template(own: RequestOptions, max_tokens: int) -> tuple[int | None, ...]:
    """The request's given tokens; raises ``InvalidRequestError`` where they cannot be a
    response.
    """
    template = own.response_template
    if template is None:
        if own.return_given is not None:
            raise InvalidRequestError(
                f"return_given={own.return_given}: nothing is given; set "
                f"response_template, or leave return_given unset"
            )
        return ()
    if max_tokens < (own.returned_length or 0):
        raise InvalidRequestError(
            f"max_tokens={max_tokens} (gen_length) is less than the "
            f"{own.returned_length} tokens that come back by the template; raise it, "
            f"or leave it unset"
        )
    if None not in template:
        raise InvalidRequestError(
            "response_template has nothing to fill in; put None where the model is to "
            "write"
        )
    if own.return_given is False and own.stream_granularity == "step":
        raise InvalidRequestError(
            "return_given=False leaves out what stream_granularity='step' shows; leave "
            "one unset"
        )
    return tuple(template)


def decision_template(
    packed: bytes, own: RequestOptions, params: SamplingParams
) -> tuple[int | None, ...]:
    """The response of ``Decision.packed``; refuses what only generation has, and where
    nothing is left to decide.
    """
    named = own.model_dump(exclude_none=True, exclude={"passes", "trace"})
    named |= {
        name: value
        for name, unused in _UNUSED.items()
        if (value := getattr(params, name)) not in (unused, {})
    }
    if named:
        name, value = next(iter(named.items()))
        raise InvalidRequestError(
            f"{name}={value}: a decision has the model's own distribution, and its "
            f"passes commit whole fields; leave {name} unset"
        )
    template = unpacked_decision(packed).template
    if None not in template:
        raise InvalidRequestError(
            "fields: each has a single text, so that nothing is left to decide"
        )
    return template


def end_token_ids(params: SamplingParams, hf_config: object) -> frozenset[int]:
    """Tokens that end a response: the model's (unless ``ignore_eos``) and the request's
    ``stop_token_ids``.
    """
    ends = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        ends.update(every_end_token(hf_config))
        if params.eos_token_id is not None:
            ends.add(params.eos_token_id)
    return frozenset(ends)


def with_tokens(
    spec: DecodingSpec, params: SamplingParams, hf_config: object
) -> DecodingSpec:
    """``spec`` with the request's end tokens, and what is added to the logits of which
    tokens.
    """
    if params.min_tokens > spec.layout.num_sent:
        raise InvalidRequestError(
            f"min_tokens={params.min_tokens} is out of range: {spec.layout.num_sent} tokens "
            f"come back; it must be 0 … {spec.layout.num_sent}"
        )
    ends, first_end = (
        end_token_ids(params, hf_config),
        spec.layout.place_of_sent(params.min_tokens),
    )
    # Also those that `ignore_eos` lets pass, as in vLLM.
    every_end = ends.union(every_end_token(hf_config), params.all_stop_token_ids)
    given = sorted(
        (token, number) for token, number in (params.logit_bias or {}).items() if number
    )
    biases = (
        TokenBias.barring(ends if spec.layout.template else (), spec.layout.last_given),
        TokenBias.barring(every_end if params.min_tokens else (), first_end),
        TokenBias.barring(barred_tokens(hf_config), spec.layout.canvas_length),
        TokenBias.barring(
            model_end_tokens(hf_config) if spec.ends.logits_eos_inf else (),
            spec.layout.canvas_length,
        ),
        TokenBias(spec.layout.canvas_length, tuple(given)),
    )
    sampling = replace(
        spec.sampling,
        token_biases=tuple(bias for bias in biases if bias.values),
        least_confident=frozenset(
            every_end_token(hf_config) if spec.ends.confidence_eos_eot_inf else ()
        ),
    )
    return replace(
        spec,
        sampling=sampling,
        ends=replace(spec.ends, tokens=ends, earliest=first_end),
    )


def check_token_numbers(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the vocabulary has not, and what cannot be
    added to logits.
    """
    biases = params.logit_bias or {}
    if len(biases) > MOST_BIASES:
        raise InvalidRequestError(
            f"logit_bias has {len(biases)} tokens; leave some out, at most "
            f"{MOST_BIASES} can be"
        )
    for name, tokens in (
        ("stop_token_ids", params.stop_token_ids or ()),
        ("logit_bias", biases),
    ):
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(
                    f"{name} holds {token}, outside the vocabulary of {vocab_size}; "
                    f"leave it out"
                )
    for token, number in biases.items():
        if not (number == -math.inf or -LARGEST_BIAS <= number <= LARGEST_BIAS):
            raise InvalidRequestError(
                f"logit_bias[{token}]={number} is out of range: it must be a number of "
                f"−{LARGEST_BIAS:g} … {LARGEST_BIAS:g}; −100 keeps a token out, 100 "
                f"brings it in"
            )
