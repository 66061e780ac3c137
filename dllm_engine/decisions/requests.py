"""Decisions as requests: from the schema of their fields to parameters, and from
outputs to answers.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from dllm_engine.constraints.decision import unpacked_decision
from dllm_engine.decisions.build import DecisionInput
from dllm_engine.figures import DiffusionFigures
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.sampling_params import DECISION
from dllm_engine.structured_output.automata import built, when_built
from dllm_engine.structured_output.requests import (
    check_size,
    reading,
    schema_text,
    serialized_tokenizer,
    vocabulary_of,
)
from dllm_engine.text import is_text

TOP_K = 5
"""Default number of values that are reported of a field with a pattern."""


class DecisionOutput(NamedTuple):
    """Answer of a decision."""

    values: dict[str, Any]
    """Value of each field in the most probable text."""
    probabilities: dict[str, float]
    """Probability of each field's value."""
    distributions: dict[str, list[dict[str, Any]]]
    """Values of each field and their probabilities, most probable first; of a field
    with a pattern, the first few.
    """
    text: str
    """The most probable text: a JSON object, or the template."""
    figures: DiffusionFigures
    """If the request failed, ``figures.error`` is the reason, and there are no values.
    """

    @classmethod
    def of(cls, output: RequestOutput) -> "DecisionOutput":
        completion = output.outputs[0]
        figures: DiffusionFigures = completion.diffusion
        values, probabilities, distributions = (
            {name: answer[key] for name, answer in figures.decision.items()}
            for key in ("value", "probability", "distribution")
        )
        return cls(values, probabilities, distributions, completion.text, figures)


def schema_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of fields in Python: ``bool``, a ``range``, a compiled regular
    expression that the whole value matches, a list of choices, or a schema. A schema of
    all fields stays as it is."""
    if fields.get("type") == "object" and isinstance(fields.get("properties"), dict):
        return dict(fields)
    properties = {name: _property(name, field) for name, field in fields.items()}
    return {"type": "object", "properties": properties, "required": [*properties]}


def _property(name: str, field: Any) -> dict[str, Any]:
    match field:
        case dict():
            return field
        case type() if field is bool:
            return {"type": "boolean"}
        case range() if field.step == 1 and len(field):
            return {
                "type": "integer",
                "minimum": field.start,
                "maximum": field.stop - 1,
            }
        case re.Pattern() if (
            isinstance(field.pattern, str) and field.flags == re.UNICODE
        ):
            return {"type": "string", "pattern": f"^(?:{field.pattern})$"}
        case list() | tuple() | range() if len(field):
            return {"enum": list(field)}
    raise InvalidRequestError(
        f"fields.{name}={field!r}: give bool, a range, a compiled regular expression "
        f"without flags, a list of choices, or a JSON schema"
    )


def decision_params(
    schema: Any,
    tokenizer: Any,
    vllm_config: Any,
    *,
    template: str | None = None,
    passes: int = 1,
    top_k: int = TOP_K,
) -> SamplingParams:
    """Parameters of a decision with the settings of ``LLM.decide``. Waits until the
    decision is built.

    ``schema`` is a JSON schema of an object, with a property for each field. Raises
    ``InvalidRequestError`` naming the field, or the setting, that is not supported.
    """
    return params_of(
        built(_decision_input(schema, template, top_k, tokenizer, vllm_config)), passes
    )


async def decision_params_when_built(
    schema: Any,
    tokenizer: Any,
    vllm_config: Any,
    *,
    template: str | None = None,
    passes: int = 1,
    top_k: int = TOP_K,
) -> SamplingParams:
    """Call ``decision_params`` without blocking the event loop."""
    decision_input = await reading(
        _decision_input, schema, template, top_k, tokenizer, vllm_config
    )
    return params_of(await when_built(decision_input), passes)


def params_of(packed: bytes, passes: int) -> SamplingParams:
    """Parameters of a request for a packed decision."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=len(unpacked_decision(packed).template),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        extra_args={DECISION: packed, "passes": passes},
    )


def _decision_input(
    schema: Any, template: str | None, top_k: int, tokenizer: Any, vllm_config: Any
) -> DecisionInput:
    """Input of a decision's build. Raises ``InvalidRequestError`` for a schema or
    template that is not a text or is too long.
    """
    text = schema_text(schema, "fields")
    check_size(text, "fields", "ask for fewer fields, or leave out descriptions")
    if template is not None:
        if not isinstance(template, str) or not is_text(template):
            raise InvalidRequestError(
                "template: it is not valid Unicode text; give one"
            )
        check_size(template, "template", "shorten it")
    model_config = vllm_config.model_config
    engine = EngineOptions.from_vllm_config(vllm_config)
    return DecisionInput(
        text,
        template,
        top_k,
        vocabulary_of(tokenizer, model_config.hf_config.vocab_size),
        serialized_tokenizer(tokenizer),
        model_config.max_model_len,
        engine.max_automaton_states,
        engine.max_automaton_seconds,
        engine.max_automaton_search,
    )
