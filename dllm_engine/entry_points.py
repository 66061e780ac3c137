"""Entry points, by which installed packages add cache methods and unmasking rules. This
package adds its own in the same way.
"""

import importlib.metadata
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import EntryPoint
from typing import Any, Generic, TypeVar

OWN_PACKAGE = "dllm-engine"
Member = TypeVar("Member")


class PluginError(Exception):
    """Error about an entry point that cannot be used. The message names its package,
    and says what to do. Not a ``ValueError``, because pydantic would report it as an
    error of an option.
    """


def _package(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else entry.dist.name


class EntryPointGroup(Mapping[str, Member], Generic[Member]):
    """Members of a group of entry points by name, in alphabetical order. All are
    imported at the first use, so that a broken member is reported at the start.
    """

    def __init__(self, group: str, kind: type[Member], reserved: Sequence[str]) -> None:
        """``reserved``: names that members must not have, because they have another
        meaning in options.
        """
        self.group = group
        self._kind = kind
        self._reserved = reserved

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def package(self, name: str) -> str:
        """The package that a member comes from."""
        return _package(self._entries[name])

    @property
    def own(self) -> list[str]:
        """Names of the members that this package defines."""
        return [name for name in self if self.package(name) == OWN_PACKAGE]

    def function(self, name: str, target: str) -> Callable[..., Any]:
        """Import the function or class that the member ``name`` names as
        ``module:name``.
        """
        function = self._import(name, target)
        if not callable(function):
            raise self.error(name, f"{target!r} is not a function or class")
        return function

    def error(self, name: str, fault: str) -> PluginError:
        """The error about a faulty member."""
        entry = self._entries[name]
        remedy = "mend that package, or uninstall it"
        if _package(entry) == OWN_PACKAGE:
            remedy = f"its metadata may be older than its code: {_REINSTALL}"
        return PluginError(
            f"entry point {name!r} ({self.group}) of the package {_package(entry)}: "
            f"{fault}; {remedy}"
        )

    def _import(self, name: str, target: str) -> Any:
        try:
            return pkgutil.resolve_name(target)
        except Exception as error:
            raise self.error(
                name, f"{target!r} cannot be imported: {type(error).__name__}: {error}"
            ) from error

    @cached_property
    def _entries(self) -> dict[str, EntryPoint]:
        entries: dict[str, EntryPoint] = {}
        for entry in sorted(importlib.metadata.entry_points(group=self.group)):
            if entry.name in entries:
                packages = sorted(map(_package, (entries[entry.name], entry)))
                raise PluginError(
                    f"the packages {' and '.join(packages)} both have an entry point "
                    f"{entry.name!r} ({self.group}); rename one, or uninstall a package"
                )
            entries[entry.name] = entry
        if OWN_PACKAGE not in map(_package, entries.values()):
            raise PluginError(
                f"the installed metadata of {OWN_PACKAGE} have no entry points of "
                f"{self.group}: they are older than its code; {_REINSTALL}"
            )
        return entries

    @cached_property
    def _members(self) -> dict[str, Member]:
        return {name: self._load(name, entry) for name, entry in self._entries.items()}

    def _load(self, name: str, entry: EntryPoint) -> Member:
        if name in self._reserved or not re.fullmatch("[a-z][a-z0-9_]*", name):
            raise self.error(
                name,
                f"a name consists of lower-case letters, digits and underscores, and "
                f"is none of {', '.join(self._reserved)}",
            )
        member = self._import(name, entry.value)
        if not isinstance(member, self._kind):
            raise self.error(
                name,
                f"{entry.value!r} names {member!r}, which is not an instance of "
                f"{self._kind.__name__}",
            )
        return member


_REINSTALL = (
    f"install {OWN_PACKAGE} again (in a checkout: python3 scripts/dev.py setup)"
)
