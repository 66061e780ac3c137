"""Facts about a request option beside its type and meaning. The option's field has
them.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from pydantic.fields import FieldInfo

from dllm_engine.decoding.option_types import Options
from dllm_engine.decoding.unmasking_policies import Measure
from dllm_engine.families import Attention

Alternatives = Literal["counts", "rules"]
"""Sets of options of which a request may set only one: ``counts`` say how many tokens a
step unmasks, ``rules`` are rules of parallel unmasking.
"""


class Exclusion(NamedTuple):
    """Another option that a request may not set together with this one, and the reason."""

    option: str
    because: str


class AttentionNeed(NamedTuple):
    """Kind of attention that an option needs, and the reason why other models do not
    have the option.
    """

    attention: Attention
    because: str


class MeasureNeed(NamedTuple):
    """Measures that an option needs from the unmasking policy, and its use of them."""

    measures: tuple[Measure, ...]
    use: str


@dataclass(frozen=True)
class Facts:
    """Who may have a default for an option, and with which options it cannot be
    combined.
    """

    default_by: Literal["engine", "checkpoint"] | None = None
    """``engine``: an engine may have a default. ``checkpoint``: a checkpoint may have
    one too, because the option means the same in every engine."""
    one_of: Alternatives | None = None
    excludes: tuple[Exclusion, ...] = ()
    """Options that exclude this one. If a request sets one of the two, the other gets
    no default.
    """
    replaces: tuple[str, ...] = ()
    """Further options or ``Alternatives`` that get no default if a request sets this
    option.
    """
    decided_by_guide: bool = False
    """True if a guided request may not set it."""
    needs_attention: AttentionNeed | None = None
    needs_measure: MeasureNeed | None = None
    needs_decided: bool = False
    """True if decided tokens must stay, so that no policy may take them back."""
    off: Any = None
    """Value without effect, as if the option were not set."""
    in_decisions: bool = False
    """True if a decision may set it."""


class OptionGroup(Options):
    """Base class of a group of request options. One file declares, resolves and refuses
    them. An option that a request does not set is None.
    """

    @classmethod
    @cache
    def facts(cls) -> dict[str, Facts]:
        """Facts of each option, by name."""
        return {name: _facts_of(field) for name, field in cls.model_fields.items()}

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that the request sets."""
        values = vars(self)
        named = self.model_fields_set
        return {
            name: values[name]
            for name in self.facts()
            if name in named and values[name] is not None
        }

    def settings(self, names: Collection[str], prefix: str) -> dict[str, Any]:
        """The set options among ``names``, by their names without ``prefix``."""
        return {
            name.removeprefix(prefix): value
            for name, value in self.chosen.items()
            if name in names
        }

    @property
    def effective(self) -> dict[str, Any]:
        """The options that are set to a value with an effect."""
        facts = self.facts()
        return {
            name: value
            for name, value in self.chosen.items()
            if value != facts[name].off
        }


def _facts_of(field: FieldInfo) -> Facts:
    return next((data for data in field.metadata if isinstance(data, Facts)), Facts())
