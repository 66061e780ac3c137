"""Checks of a request before it enters the engine. A request that fails is answered
with status 400.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

import msgspec
from vllm.sampling_params import RequestOutputKind, SamplingParams

from dllm_engine.constraints.constraint import constraint_of
from dllm_engine.constraints.decision import unpacked_decision
from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.infill.template import check_length
from dllm_engine.options import EngineOptions
from dllm_engine.params import DiffusionParams, check_place
from dllm_engine.request_options.defaults import options_with_defaults
from dllm_engine.request_options.ends import end_token_ids
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.fields import FACTS, RequestOptions, check_exclusions
from dllm_engine.request_options.layout import (
    LengthRule,
    length_rule,
    refuse_length_options,
)
from dllm_engine.request_options.resolve import check_room, resolve_decoding
from dllm_engine.request_options.sampling import check_token_numbers
from dllm_engine.request_options.sampling_params import (
    CONSTRAINT,
    DECISION,
    REASONING,
    DefaultLength,
    bytes_in,
    parse_request_options,
    request_options,
)
from dllm_engine.structured_output.requests import constrained
from dllm_engine.text import shortened

# Fields of SamplingParams that are refused, each with the value that has no effect.
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "prompt_logprobs": (None, "log-probabilities of the prompt are"),
    "logprob_token_ids": (None, "log-probabilities of chosen tokens are"),
    "presence_penalty": (0.0, "penalties are"),
    "frequency_penalty": (0.0, "penalties are"),
    "repetition_penalty": (1.0, "penalties are"),
    "min_p": (0.0, "min_p sampling is"),
    "allowed_token_ids": (None, "restricting the tokens is"),
    "bad_words": ([], "forbidding words is"),
    "repetition_detection": (None, "repetition detection is"),
    "trace_decode_token_ids": (None, "trace replay is"),
}
_INSTEAD = {
    "prompt_logprobs": "leave it unset, and echo where logprobs is set; POST /v1/likelihoods gives those of an answer "
    "to a prompt, in Python LLM.masked_logprobs"
}
_KINDS = get_type_hints(SamplingParams)
_DEFAULTS = SamplingParams()


def admitted(
    params: SamplingParams,
    prompt_token_ids: list[int],
    tokenizer: Any,
    vllm_config: Any,
) -> SamplingParams:
    """A request's parameters in the form that the engine takes. Raises
    ``InvalidRequestError`` naming the setting, its value and what to do, if the request
    cannot be served.
    """
    _check_types(params)
    if isinstance(params, DiffusionParams):
        params = params.to_sampling_params()
    template = (params.extra_args or {}).get("response_template")
    max_model_len = vllm_config.model_config.max_model_len
    check_length("response_template", template, max_model_len)
    params = resolved_params(params, prompt_token_ids, tokenizer, vllm_config)
    _check_request(params, prompt_token_ids, vllm_config)
    return params


def _check_types(params: SamplingParams) -> None:
    """Refuse a field of another type than vLLM declares, or a number that cannot be
    sent. In Python, vLLM does not check this.
    """
    for name in SamplingParams.__struct_fields__:
        value = getattr(params, name)
        if value is getattr(_DEFAULTS, name):
            continue
        kind = _KINDS[name]
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise InvalidRequestError(f"{name} is out of range: it may have 64 bits")
        classes = [
            member
            for member in (kind, *get_args(kind))
            if getattr(member, "__module__", "").startswith("vllm")
        ]
        try:
            if not classes:
                msgspec.convert(value, kind)
            elif not isinstance(value, kind):
                raise msgspec.ValidationError(
                    f"Expected `{classes[0].__name__}`, got `{type(value).__name__}`"
                )
        except (msgspec.ValidationError, AttributeError) as error:
            raise InvalidRequestError(f"{name}={shortened(value)}: {error}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequestError(f"{name}={value} must be a finite number")


def _check_request(
    params: SamplingParams, prompt_token_ids: list[int], vllm_config: Any
) -> None:
    model_config = vllm_config.model_config
    engine = EngineOptions.from_vllm_config(vllm_config)
    hf_config = model_config.hf_config
    max_model_len = model_config.max_model_len
    for name in _UNSUPPORTED:
        if reason := unsupported(name, getattr(params, name)):
            raise InvalidRequestError(
                f"{reason}; {_INSTEAD.get(name, 'leave it unset')}"
            )
    check_place(
        name
        for name in params.extra_args or {}
        if name not in RequestOptions.model_fields
    )
    check_token_numbers(params, hf_config.vocab_size)
    if params.logprobs is not None and not 0 <= params.logprobs <= hf_config.vocab_size:
        raise InvalidRequestError(
            f"logprobs={params.logprobs} is not supported for diffusion models; name "
            f"how many of the {hf_config.vocab_size} tokens to report, 0 for the "
            f"response's own"
        )
    check_tokens(prompt_token_ids, hf_config)
    prompt_length = len(prompt_token_ids)
    gen_length = params.max_tokens
    if gen_length is not None and prompt_length + gen_length > max_model_len:
        # Check this before anything is allocated for each token of the response.
        raise _too_long(
            prompt_length, gen_length, prompt_length + gen_length, max_model_len
        )
    _check_length_chosen(params, engine)
    spec = resolve_decoding(params, prompt_length, hf_config, engine)
    layout = spec.layout
    _check_given(layout.template, spec.ends.tokens, hf_config)
    _check_decision(spec)
    longest = hf_config.family.longest_canvas(max_model_len)
    if layout.response_span.stop > max_model_len or layout.canvas_length > longest:
        shorten = "shorten one"
        # Only the end of its last block exceeds the limit.
        if layout.response_span.stop <= max_model_len:
            shorten = f"lower block_length={layout.block_length}"
        raise _too_long(
            prompt_length,
            layout.gen_length,
            layout.canvas_length,
            max_model_len,
            shorten,
        )
    _check_constraint(spec, params.min_tokens, engine.max_automaton_search)
    if (
        spec.reports.streams_steps
        and params.output_kind is RequestOutputKind.FINAL_ONLY
    ):
        raise InvalidRequestError(
            "stream_granularity='step' needs a response that is streamed: set stream "
            "to true, or in Python use vLLM's AsyncLLM; leave stream_granularity unset "
            "otherwise"
        )
    geometry = engine.geometry(
        hf_config, vllm_config.parallel_config.tensor_parallel_size
    )
    num_blocks = vllm_config.cache_config.num_gpu_blocks
    check_room(
        spec,
        engine,
        vllm_config.scheduler_config.max_num_batched_tokens,
        geometry,
        # One page is vLLM's null block. The number is None until the engine has
        # reported it.
        None if num_blocks is None else num_blocks - 1,
    )


def open_length_rule(
    extra_args: Mapping[str, Any], engine: EngineOptions, *, ignore_eos: bool
) -> LengthRule | None:
    """Rule that chooses the length of a response; None if a request states its length
    or is a decision.
    """
    if DECISION in extra_args:
        return None
    length_options = parse_request_options(
        {name: x for name, x in extra_args.items() if name in FACTS}
    )
    check_exclusions(length_options)
    options = options_with_defaults(length_options, engine.request_defaults)
    return length_rule(length_options, options, ignore_eos=ignore_eos)


def _check_length_chosen(params: SamplingParams, engine: EngineOptions) -> None:
    extra_args = params.extra_args or {}
    if open_length_rule(extra_args, engine, ignore_eos=params.ignore_eos) is not None:
        raise InvalidRequestError(
            "auto_length=True: lengths are chosen by LLM, by AsyncLLM.generate and by "
            "the server, not by the engine below them; call one of these"
        )
    refuse_length_options(request_options(params))


def check_tokens(tokens: list[int], hf_config: Any, name: str = "the prompt") -> None:
    """Raise ``InvalidRequestError`` if a prompt is empty, or has a token that no text
    has. ``name``: name of the prompt in the error.
    """
    if not tokens:
        raise InvalidRequestError(f"{name} is empty; give at least one token")
    if min(tokens) < 0 or max(tokens) >= hf_config.vocab_size:
        position = next(
            i for i, token in enumerate(tokens) if not 0 <= token < hf_config.vocab_size
        )
        raise InvalidRequestError(
            f"{name} contains token id {tokens[position]} at position {position}, "
            f"outside the vocabulary of {hf_config.vocab_size}"
        )
    if hf_config.mask_token_id in tokens:
        raise InvalidRequestError(
            f"{name} contains the mask token (id {hf_config.mask_token_id}) at "
            f"position {tokens.index(hf_config.mask_token_id)}; masks mark the "
            f"response's positions and cannot be prompted. To write about this token, "
            f"spell its text in another way, for example with a space in it"
        )


def unsupported(name: str, value: Any) -> str | None:
    """Reason why a field of ``SamplingParams`` cannot have this value; None if it can."""
    unused, what = _UNSUPPORTED.get(name, (value, ""))
    if value is None or value == unused or value in ([], {}):
        return None
    shown = f"{name}={value!r}" if isinstance(value, int | float | str) else name
    return f"{shown}: {what} not supported for diffusion models"


def _too_long(
    prompt_length: int,
    gen_length: int,
    canvas_length: int,
    max_model_len: int,
    shorten: str = "shorten one",
) -> InvalidRequestError:
    return InvalidRequestError(
        f"prompt ({prompt_length} tokens) and gen_length={gen_length} (max_tokens) "
        f"need a canvas of {canvas_length}, max_model_len is {max_model_len}; "
        f"{shorten} or raise max_model_len"
    )


def _check_given(
    template: tuple[int | None, ...], ends: frozenset[int], hf_config: Any
) -> None:
    for i, token in enumerate(template):
        if token is None:
            continue
        if not 0 <= token < hf_config.vocab_size:
            reason = f"outside the vocabulary of {hf_config.vocab_size}"
        elif token == hf_config.mask_token_id:
            reason = "the mask token; put None where the model is to write"
        elif token in ends and i + 1 < len(template):
            reason = (
                "an end token, which would end the response; leave out what follows it"
            )
        else:
            continue
        raise InvalidRequestError(f"response_template[{i}]={token} is {reason}")


def _check_decision(spec: DecodingSpec) -> None:
    if (
        spec.decision is not None
        and not spec.ends.tokens
        and unpacked_decision(spec.decision.packed).has_shorter_texts
    ):
        raise InvalidRequestError(
            "fields: their texts have different numbers of tokens, and no end token "
            "may follow a shorter one; leave ignore_eos unset"
        )


def _check_constraint(spec: DecodingSpec, min_tokens: int, max_search: int) -> None:
    text, layout, ends = spec.text, spec.layout, spec.ends.tokens
    if not text.is_constrained:
        return
    constraint = constraint_of(text.constraint, ends, text.reasoning)
    positions = layout.gen_length
    shorten = "gen_length (max_tokens)"
    if not layout.template and ends and spec.schedule.block_add_threshold is None:
        # Otherwise the texts that are possible behind a block depend on given tokens
        # there, or on the length.
        positions = min(layout.block_length, positions)
        shorten = f"block_length={layout.block_length}"
    if (size := constraint.search_size) * positions > max_search:
        raise InvalidRequestError(
            f"structured_outputs: a step searches {positions} positions of an "
            f"automaton of size {size}, together {size * positions}; "
            f"max_automaton_search is {max_search}: lower {shorten}, simplify the "
            f"expression or schema, or raise max_automaton_search"
        )

    def is_possible(first_end: int = 0, budget: int | None = None) -> bool:
        template = layout.response_template
        return bool(constraint.completable(template, first_end, budget)[0][0])

    budget = text.thinking_budget
    first_end = spec.ends.earliest - layout.prompt_length
    if is_possible(first_end, budget):
        return
    if budget is not None and is_possible(first_end):
        reason = (
            f"thinking_token_budget={budget}: no response with such short reasoning is "
            f"possible; raise it"
        )
    elif min_tokens and is_possible():
        reason = (
            f"min_tokens={min_tokens}: no text that structured_outputs accepts is so "
            f"long; lower min_tokens"
        )
    elif layout.template:
        reason = (
            "no text that structured_outputs accepts has the given tokens at their "
            "places and fills its holes"
        )
    elif (fewest := constraint.fewest_tokens()) is None:
        reason = (
            "each text that structured_outputs accepts has one of stop_token_ids in "
            "it; change these"
        )
    elif not ends:
        reason = (
            f"no text that structured_outputs accepts has exactly {layout.gen_length} "
            f"tokens, and none may end it"
        )
    else:
        reason = (
            f"gen_length={layout.gen_length} (max_tokens) is too short for "
            f"structured_outputs: the shortest text that it accepts has {fewest} tokens"
        )
    if text.reasoning is not None:
        reason += ", with the marker that ends reasoning before it"
    raise InvalidRequestError(reason)


def resolved_params(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    tokenizer: Any,
    vllm_config: Any,
) -> SamplingParams:
    """The parameters with a length (the template's, the model's default or what fits),
    and with an automaton for the text."""
    model_config = vllm_config.model_config
    # At least 1, so that the check of the request explains the error.
    room = max(model_config.max_model_len - len(prompt_token_ids), 1)
    length = _named_length(params)
    if length is None and params.structured_outputs is None:
        length = min(_default_length(params, model_config), room)
    params = constrained(
        params, prompt_token_ids, length or room, tokenizer, vllm_config
    )
    if length is None:
        length = min(_default_length(params, model_config), room)
    if params.max_tokens is not length:
        params = params.clone()
        params.max_tokens = length
    return params


def _named_length(params: SamplingParams) -> int | None:
    """Length of the response in the request, at most that of its template; None if it
    states none.
    """
    length = params.max_tokens
    named = None if length is None or isinstance(length, DefaultLength) else int(length)
    if (params.extra_args or {}).get("response_template") is None:
        return named
    length = request_options(params).returned_length or None
    return length if named is None or length is None else min(named, length)


def _default_length(params: SamplingParams, model_config: Any) -> int:
    """Tokens of a response whose request names no length: the model's default, or twice
    the shortest text that ``structured_outputs`` accepts if this is more, so that there
    is room for content, unless the server has a limit."""
    default = int(model_config.override_generation_config["max_new_tokens"])
    if model_config.dllm_response_limit is not None:
        return default
    return max(default, 2 * shortest_text(params, model_config.hf_config))


def shortest_text(params: SamplingParams, hf_config: Any) -> int:
    """Tokens of the shortest text that a request's automaton accepts; 0 without an
    automaton.
    """
    automaton = bytes_in(params, CONSTRAINT)
    if automaton is None:
        return 0
    ends = end_token_ids(params, hf_config)
    reasoning = bytes_in(params, REASONING)
    return constraint_of(automaton, ends, reasoning).fewest_tokens() or 0
