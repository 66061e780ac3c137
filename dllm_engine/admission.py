"""What a request must satisfy before it enters the engine. What fails is answered with 400 and loses nothing."""

from typing import Any

from vllm.sampling_params import SamplingParams

from dllm_engine.families import ModelFamily
from dllm_engine.options import EngineOptions
from dllm_engine.params import check_place
from dllm_engine.scheduler.constraints.constraint import constraint_of
from dllm_engine.scheduler.options.request_fields import RequestOptions
from dllm_engine.scheduler.options.request_options import InvalidRequestError, request_options
from dllm_engine.scheduler.options.resolve import end_token_ids, resolve_decoding
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.structured_output.requests import constrained

# SamplingParams fields that have no meaning here (yet), with the value that means "not used".
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "prompt_logprobs": (None, "log-probabilities of the prompt are"),
    "logprob_token_ids": (None, "log-probabilities of chosen tokens are"),
    "presence_penalty": (0.0, "penalties are"),
    "frequency_penalty": (0.0, "penalties are"),
    "repetition_penalty": (1.0, "penalties are"),
    "min_p": (0.0, "min_p sampling is"),
    "min_tokens": (0, "a minimum length is"),
    "logit_bias": (None, "logit bias is"),
    "allowed_token_ids": (None, "restricting the tokens is"),
    "bad_words": ([], "forbidding words is"),
    "repetition_detection": (None, "repetition detection is"),
    "thinking_token_budget": (None, "a thinking budget is"),
    "trace_decode_token_ids": (None, "trace replay is"),
}


def check_request(
    params: SamplingParams,
    prompt_token_ids: list[int],
    family: ModelFamily,
    engine: EngineOptions,
    hf_config: Any,
    max_model_len: int,
) -> DecodingSpec:
    """The request with every default filled in.

    Raises ``InvalidRequestError`` naming the setting, its value and what to do, if it cannot be served.
    """
    for name, (unused, what) in _UNSUPPORTED.items():
        value = getattr(params, name)
        if value is not None and value != unused:
            shown = f"{name}={value!r}" if isinstance(value, int | float | str) else name
            raise InvalidRequestError(f"{shown}: {what} not supported for diffusion models; leave it unset")
    check_place(name for name in params.extra_args or {} if name not in RequestOptions.model_fields)
    _check_integers(params, hf_config.vocab_size)
    if params.logprobs is not None and not 0 <= params.logprobs <= hf_config.vocab_size:
        raise InvalidRequestError(
            f"logprobs={params.logprobs} is not supported for diffusion models; name how many of the "
            f"{hf_config.vocab_size} tokens to report, 0 for the response's own"
        )
    if not prompt_token_ids:
        raise InvalidRequestError("the prompt is empty; give at least one token")
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= hf_config.vocab_size:
        position = next(i for i, token in enumerate(prompt_token_ids) if not 0 <= token < hf_config.vocab_size)
        raise InvalidRequestError(
            f"the prompt contains token id {prompt_token_ids[position]} at position {position}, outside the "
            f"vocabulary of {hf_config.vocab_size}"
        )
    if hf_config.mask_token_id in prompt_token_ids:
        raise InvalidRequestError(
            f"the prompt contains the mask token (id {hf_config.mask_token_id}) at position "
            f"{prompt_token_ids.index(hf_config.mask_token_id)}; masks mark the response's positions and cannot be "
            f"prompted"
        )
    prompt_length = len(prompt_token_ids)
    if params.max_tokens is not None and prompt_length + params.max_tokens > max_model_len:
        # Before anything is made for each token of the response.
        raise _too_long(prompt_length, params.max_tokens, prompt_length + params.max_tokens, max_model_len)
    spec = resolve_decoding(params, prompt_length, family, engine)
    ends = end_token_ids(params, hf_config)
    _check_given(spec.template, ends, hf_config)
    if spec.response_span.stop > max_model_len or spec.canvas_length > family.longest_canvas(max_model_len):
        fits = spec.response_span.stop <= max_model_len  # but for the end of its last block
        shorten = f"lower block_length={spec.block_length}" if fits else "shorten one"
        raise _too_long(prompt_length, spec.gen_length, spec.canvas_length, max_model_len, shorten)
    _check_constraint(spec, ends, engine.max_automaton_search)
    return spec


def _too_long(
    prompt_length: int, gen_length: int, canvas_length: int, max_model_len: int, shorten: str = "shorten one"
) -> InvalidRequestError:
    return InvalidRequestError(
        f"prompt ({prompt_length} tokens) and gen_length={gen_length} (max_tokens) need a canvas of {canvas_length}, "
        f"max_model_len is {max_model_len}; {shorten} or raise max_model_len"
    )


def _check_given(template: tuple[int | None, ...], ends: frozenset[int], hf_config: Any) -> None:
    for i, token in enumerate(template):
        if token is None:
            continue
        if not 0 <= token < hf_config.vocab_size:
            reason = f"outside the vocabulary of {hf_config.vocab_size}"
        elif token == hf_config.mask_token_id:
            reason = "the mask token; put None where the model is to write"
        elif token in ends and i + 1 < len(template):
            reason = "an end token, which would end the response; leave out what follows it"
        else:
            continue
        raise InvalidRequestError(f"response_template[{i}]={token} is {reason}")


def _check_constraint(spec: DecodingSpec, ends: frozenset[int], max_search: int) -> None:
    if spec.constraint is None:
        return
    constraint = constraint_of(spec.constraint, ends)
    # What the text may be behind a block depends on all that is given there, and without an end token on the length.
    is_whole = bool(spec.template) or not ends or spec.block_add_threshold is not None
    positions = spec.gen_length if is_whole else min(spec.block_length, spec.gen_length)
    if (size := constraint.search_size) * positions > max_search:
        shorten = "gen_length (max_tokens)" if is_whole else f"block_length={spec.block_length}"
        raise InvalidRequestError(
            f"structured_outputs: a step searches {positions} positions of an automaton of size {size}, together "
            f"{size * positions}; max_automaton_search is {max_search}: lower {shorten}, simplify the expression or "
            "schema, or raise max_automaton_search"
        )
    if constraint.completable(spec.response_template)[0][0]:
        return
    if spec.template:
        reason = "no text that structured_outputs accepts has the given tokens at their places and fills its holes"
    elif not ends:
        reason = f"no text that structured_outputs accepts has exactly {spec.gen_length} tokens, and none may end it"
    else:
        reason = (
            f"gen_length={spec.gen_length} (max_tokens) is too short for structured_outputs: the shortest text that it "
            f"accepts has {constraint.fewest_tokens()} tokens"
        )
    raise InvalidRequestError(reason)


def _check_integers(params: SamplingParams, vocab_size: int) -> None:
    for name in ("n", "seed", "max_tokens", "logprobs", "stream_interval"):
        check_integer(name, getattr(params, name))
    for token in params.stop_token_ids or ():
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids holds {token}, outside the vocabulary of {vocab_size}; leave it out"
            )


def check_integer(name: str, value: object) -> None:
    """Raise ``InvalidRequestError`` if the value is neither None nor an integer that engine processes can be sent.

    vLLM's server checks the types of most fields; in Python nobody does.
    """
    if value is None:
        return
    if not isinstance(value, int):
        raise InvalidRequestError(f"{name}={value!r} must be an integer")
    if not -(1 << 63) <= value < 1 << 63:
        raise InvalidRequestError(f"{name}={value} is out of range: an integer has at most 64 bits")


def settled_params(params: SamplingParams, prompt_length: int, tokenizer: Any, vllm_config: Any) -> SamplingParams:
    """The parameters with a length, and with an automaton for what the text must match."""
    params = constrained(params, tokenizer, vllm_config)
    if params.max_tokens is None:
        params = params.clone()
        params.max_tokens = open_gen_length(params, prompt_length, vllm_config.model_config)
    return params


def open_gen_length(params: SamplingParams, prompt_length: int, model_config: Any) -> int:
    """Response length of a request that names none: that of its template, the model's default, or what fits.

    At least 1, so that the check of the request explains.
    """
    if length := request_options(params).returned_length:
        return length
    default: int = model_config.override_generation_config["max_new_tokens"]
    return max(min(default, model_config.max_model_len - prompt_length), 1)
