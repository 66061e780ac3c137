"""Types of options, with their limits."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST_TOKENS = (1 << 31) - 1
"""Above any model's context length or vocabulary size."""

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
"""A number of tokens, positions or steps."""
CountOrZero = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Share = Annotated[float, Field(ge=0, le=1)]


class Options(BaseModel):
    """A group of options. The text behind each one is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True
    )
