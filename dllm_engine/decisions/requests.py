"""Decisions as requests: from the schema of their fields to parameters, and from outputs to answers."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

from cachetools import LRUCache, cached
from vllm import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from dllm_engine.decisions.build import Texts, build_decision
from dllm_engine.decisions.fields import read_fields
from dllm_engine.figures import DiffusionFigures
from dllm_engine.scheduler.constraints.decision import unpacked_decision
from dllm_engine.scheduler.options.request_options import DECISION, InvalidRequestError
from dllm_engine.structured_output.automata import automaton
from dllm_engine.structured_output.requests import check_size, schema_text
from dllm_engine.text import is_text

TOP_K = 5
"""Values that are reported of a field with a pattern, unless a request says otherwise."""


class DecisionOutput(NamedTuple):
    """Answer of a decision."""

    values: dict[str, Any]
    """Value of each field in the most probable text."""
    probabilities: dict[str, float]
    """Probability of each field's value."""
    distributions: dict[str, list[dict[str, Any]]]
    """Values of each field and their probabilities, most probable first; of a field with a pattern, the first few."""
    text: str
    """The most probable text: a JSON object, or the template."""
    figures: DiffusionFigures
    """If the request failed, ``figures.error`` says why, and there are no values."""

    @classmethod
    def of(cls, output: RequestOutput) -> "DecisionOutput":
        completion = output.outputs[0]
        figures: DiffusionFigures = completion.diffusion
        values, probabilities, distributions = (
            {name: answer[key] for name, answer in figures.decision.items()}
            for key in ("value", "probability", "distribution")
        )
        return cls(values, probabilities, distributions, completion.text, figures)


def decision_params(
    schema: Any, tokenizer: Any, vllm_config: Any, *, template: str | None = None, passes: int = 1, top_k: int = TOP_K
) -> SamplingParams:
    """Parameters of a decision with the settings of ``LLM.decide``. Waits until the automata of patterns are built.

    ``schema`` is a JSON schema of an object, with a property for each field. Raises ``InvalidRequestError`` naming the
    field, or the setting, that is not supported.
    """
    packed = _packed(*_checked(schema, template), tokenizer, top_k, vllm_config)
    decision = unpacked_decision(packed)  # as the checks of the request will read it
    return SamplingParams(
        temperature=0.0,
        max_tokens=len(decision.template),
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={DECISION: packed, "passes": passes},
    )


async def decision_params_when_built(
    schema: Any, tokenizer: Any, vllm_config: Any, *, template: str | None = None, **settings: int
) -> SamplingParams:
    """Call ``decision_params`` without holding up the event loop."""
    texts = _texts(*_checked(schema, template))
    for name, wanted in (await asyncio.to_thread(texts.automata_needed, tokenizer, vllm_config)).items():
        with _naming(name):
            await asyncio.wrap_future(automaton(wanted))
    return await asyncio.to_thread(decision_params, schema, tokenizer, vllm_config, template=template, **settings)


def _checked(schema: Any, template: str | None) -> tuple[str, str | None]:
    """The schema as JSON, and the template. Raises ``InvalidRequestError`` for one that is no text, or too long."""
    text = schema_text(schema, "fields")
    check_size(text, "fields", "ask for fewer fields, or leave out descriptions")
    if template is not None:
        if not isinstance(template, str) or not is_text(template):
            raise InvalidRequestError("template: it is no valid Unicode text; give one")
        check_size(template, "template", "shorten it")
    return text, template


def _texts(schema: str, template: str | None) -> Texts:
    fields = read_fields(json.loads(schema))
    return Texts.as_json(fields) if template is None else Texts.in_template(fields, template)


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Let an error about an automaton name the field that needs it."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(f"fields.{field}: {str(error).partition(': ')[2]}") from None


@cached(
    LRUCache(64),
    key=lambda *arguments: (*arguments[:-1], arguments[-1].instance_id),  # a configuration has no hash
    lock=Lock(),  # read in several threads
)
def _packed(schema: str, template: str | None, tokenizer: Any, top_k: int, vllm_config: Any) -> bytes:
    texts = _texts(schema, template)
    automata = {}
    for name, wanted in texts.automata_needed(tokenizer, vllm_config).items():
        with _naming(name):
            automata[name] = automaton(wanted).result()
    return build_decision(texts, automata, tokenizer, vllm_config, top_k).packed
