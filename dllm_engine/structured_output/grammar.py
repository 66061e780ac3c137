"""What a request's text must match."""

from dataclasses import dataclass
from typing import Literal

from vllm.sampling_params import StructuredOutputsParams


@dataclass(frozen=True)
class Grammar:
    """Equal for requests that may write the same texts in the same way."""

    kind: Literal["regex", "choice", "json", "json_object"]
    text: str
    """The regex; the choices or the schema as JSON; nothing for any JSON object."""


def grammar_of(structured: StructuredOutputsParams) -> Grammar:
    """The grammar that a request names; raises ``InvalidRequestError`` for one that is not supported, naming the
    construct."""
    raise NotImplementedError
