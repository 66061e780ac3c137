"""Grammar of a request's text, from vLLM's ``structured_outputs``."""

import json

from vllm.sampling_params import StructuredOutputsParams

from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.structured_output.build import Grammar

LONGEST_GRAMMAR = 1 << 16
"""Characters of a regex, of the choices or of a schema as JSON. An automaton of more would have too many states."""
_REFUSED = {
    "grammar": "context-free grammars are not supported; use regex, choice or json",
    "structural_tag": "structural tags are not supported; use regex, choice or json",
    "whitespace_pattern": "not supported; JSON is written with at most one space behind a comma or a colon, or, with "
    "disable_any_whitespace, with none",
    "disable_additional_properties": "not supported; set additionalProperties to false in the schema",
}


def grammar_of(structured: StructuredOutputsParams) -> Grammar:
    """The grammar that a request names. It is read only where its automaton is built, since that may take long.

    Raises ``InvalidRequestError`` for a kind that is not supported, and for a text that is too long or none.
    """
    for name, reason in _REFUSED.items():
        if getattr(structured, name) not in (None, False):
            raise InvalidRequestError(f"structured_outputs.{name}: {reason}")
    grammar = _named(structured)
    if len(grammar.text) > LONGEST_GRAMMAR:
        raise InvalidRequestError(
            f"structured_outputs.{grammar.kind}: its {len(grammar.text)} characters are more than the "
            f"{LONGEST_GRAMMAR} that are supported; give a shorter one, such as a schema without descriptions"
        )
    try:
        grammar.text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"structured_outputs.{grammar.kind}: a lone surrogate is not supported") from None
    return grammar


def _named(structured: StructuredOutputsParams) -> Grammar:
    spaces = not structured.disable_any_whitespace
    if structured.regex is not None:
        return Grammar("regex", structured.regex)
    if structured.choice is not None:
        if not structured.choice:
            raise InvalidRequestError("structured_outputs.choice: the list is empty")
        return Grammar("choice", json.dumps(list(dict.fromkeys(structured.choice)), ensure_ascii=False))
    if structured.json is not None:
        schema = structured.json
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            return Grammar("json", json.dumps(schema, ensure_ascii=False), spaces)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"structured_outputs.json: the schema is no JSON: {error}") from None
    if structured.json_object is not True:
        raise InvalidRequestError("structured_outputs.json_object: only true is supported; leave it out otherwise")
    return Grammar("json_object", "", spaces)
