"""Resolution of a decision's parameters into a ``DecodingSpec``."""

from vllm.sampling_params import SamplingParams

from dllm_engine.families import ModelFamily
from dllm_engine.scheduler.constraints.decision import unpacked_decision
from dllm_engine.scheduler.options.request_fields import RequestOptions
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.scheduler.request import DecodingSpec

_UNUSED = {"temperature": 0.0, "min_tokens": 0, "logit_bias": None, "structured_outputs": None}
"""Parameters without a meaning for a decision, whose distribution is the model's."""


def resolve_decision(
    packed: bytes, params: SamplingParams, own: RequestOptions, prompt_length: int, family: ModelFamily
) -> DecodingSpec:
    """The settings of a decision; defaults of the engine and the checkpoint are for generation alone.

    Args:
        packed: ``Decision.packed``.
        own: options that the request itself names.

    Raises ``InvalidRequestError`` for what only generation has, and where nothing is left to decide.
    """
    named = own.model_dump(exclude_none=True, exclude={"passes", "trace"})
    named |= {name: value for name, unused in _UNUSED.items() if (value := getattr(params, name)) not in (unused, {})}
    if named:
        name, value = next(iter(named.items()))
        raise InvalidRequestError(
            f"{name}={value}: a decision has the model's own distribution, and its passes commit whole fields; leave "
            f"{name} unset"
        )
    template = unpacked_decision(packed).template
    if None not in template:
        raise InvalidRequestError("fields: each has a single text, so that nothing is left to decide")
    gen_length = len(template)
    return DecodingSpec(
        prompt_length=prompt_length,
        gen_length=gen_length,
        block_length=family.block_length_of(gen_length),
        steps=gen_length,
        attention=family.attention,
        whole_blocks=family.whole_blocks,
        shifts_logits=family.shifts_logits,
        template=template,
        decision=packed,
        passes=own.passes or 1,
        num_logprobs=params.logprobs,
    )
