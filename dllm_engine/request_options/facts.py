"""Facts of a request option beside its type and its meaning, kept by its field."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from pydantic.fields import FieldInfo

from dllm_engine.decoding.option_types import Options
from dllm_engine.decoding.unmasking_policies import Measure
from dllm_engine.families import Attention

Alternatives = Literal["counts", "rules"]
"""Sets of options of which a request may set one: how many tokens a step unmasks, and
the rules of parallel unmasking.
"""


class Exclusion(NamedTuple):
    """An option that a request may not set as well, and why."""

    option: str
    because: str


class AttentionNeed(NamedTuple):
    """Attention of the models that have an option, and why others have it not."""

    attention: Attention
    because: str


class MeasureNeed(NamedTuple):
    """Measures of the unmasking policies that go with an option, and what it does with
    them.
    """

    measures: tuple[Measure, ...]
    use: str


@dataclass(frozen=True)
class Facts:
    """Who may have a default for an option, and what it does not go with."""

    default_by: Literal["engine", "checkpoint"] | None = None
    """``engine``: an engine may have a default. ``checkpoint``: a checkpoint as well,
    since the option means the same in every engine."""
    one_of: Alternatives | None = None
    excludes: tuple[Exclusion, ...] = ()
    """Neither gets a default if a request sets the other."""
    replaces: tuple[str, ...] = ()
    """More options or ``Alternatives`` that get no default if a request sets this one.
    """
    decided_by_guide: bool = False
    """True if a guided request may not set it."""
    needs_attention: AttentionNeed | None = None
    needs_measure: MeasureNeed | None = None
    needs_decided: bool = False
    """True if decided tokens must stay, so that no policy may take them back."""
    off: Any = None
    """Value that asks for nothing, as if the option were not set."""
    in_decisions: bool = False
    """True if a decision may set it."""


class OptionGroup(Options):
    """Request options that one file declares, gives defaults and refuses. They are None
    where a request does not set them.
    """

    @classmethod
    @cache
    def facts(cls) -> dict[str, Facts]:
        """The facts of each option."""
        return {name: _facts_of(field) for name, field in cls.model_fields.items()}

    @property
    def given(self) -> dict[str, Any]:
        """The options that are set."""
        values = vars(self)
        named = self.model_fields_set
        return {
            name: values[name]
            for name in self.facts()
            if name in named and values[name] is not None
        }

    def settings(self, names: Collection[str], prefix: str) -> dict[str, Any]:
        """Those of some options that are set, by their names without a prefix."""
        return {
            name.removeprefix(prefix): value
            for name, value in self.given.items()
            if name in names
        }

    @property
    def asked(self) -> dict[str, Any]:
        """The options that are set to a value that asks for something."""
        facts = self.facts()
        return {
            name: value
            for name, value in self.given.items()
            if value != facts[name].off
        }


def _facts_of(field: FieldInfo) -> Facts:
    return next((data for data in field.metadata if isinstance(data, Facts)), Facts())
