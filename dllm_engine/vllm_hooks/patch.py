"""Replaces attributes of vLLM, after checking that they are what we expect."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from symtable import SymbolTable, symtable
from typing import Any, Literal

from dllm_engine.vllm_hooks.release import IncompatibleVLLMError

Scope = Literal["attribute", "every_import", "if_imported"]
Original = Callable[..., Any]
"""vLLM's own function, which ours replaces."""
_MARK = "_dllm_engine_patch"


def is_ours(owner: Any) -> bool:
    """Return True if an object of vLLM, which has a ``vllm_config`` or a ``model_config``, serves one of our models."""
    model_config = getattr(getattr(owner, "vllm_config", owner), "model_config", None)
    return getattr(model_config, "is_dllm_engine", False)


@dataclass(frozen=True)
class Patch:
    """One attribute of vLLM that is replaced."""

    target: str
    """``module:attribute`` or ``module:Class.attribute``."""
    replacement: str
    """``module:function`` of ours, relative to this package. It is called with the original and what the original is
    called with; the parameters that it names must be the original's first ones."""
    why: str
    scope: Scope = "attribute"
    """``every_import``: also in modules of vLLM that have imported the function by name. ``if_imported``: only if the
    module is already loaded."""


@dataclass(frozen=True)
class Private:
    """Names that we use of a module of vLLM that is not part of its public interface."""

    module: str
    names: str
    """Separated by spaces: ``name``, or ``Class.attribute`` if we override, set or read the attribute."""
    why: str


def apply(patches: Iterable[Patch]) -> None:
    """Replace the attributes, all or none. A second call changes nothing.

    Raises:
        IncompatibleVLLMError: an attribute is missing or takes other parameters; names it and what it is needed for.
    """
    found = []
    for patch in patches:
        module_name, _, path = patch.target.partition(":")
        if patch.scope != "if_imported" or module_name in sys.modules:
            found.append((patch, *_original(patch, module_name, path)))
    found = [each for each in found if not hasattr(each[-1], _MARK)]
    replacements = [_replacement(patch, original) for patch, _, _, original in found]
    for each, replacement in zip(found, replacements, strict=True):
        _replace(*each, replacement)


def check(uses: Iterable[Private]) -> None:
    """Raise ``IncompatibleVLLMError`` if vLLM's sources lack a name. Imports nothing: a worker must not load what only
    the front end uses."""
    for use in uses:
        for name in use.names.split():
            if name not in _names_in_source(use.module):
                raise _changed(f"It uses {use.module}:{name}, {use.why}, but it is not there")


def _original(patch: Patch, module_name: str, path: str) -> tuple[Any, str, Any]:
    """The owner of a patched attribute, the attribute's name and its value."""
    owner_path, _, name = path.rpartition(".")
    try:
        module = import_module(module_name)
        owner = attrgetter(owner_path)(module) if owner_path else module
        original = vars(owner)[name]  # its own, not one that it inherits
    except (ImportError, AttributeError, KeyError) as error:
        elsewhere = isinstance(error, ImportError) and not (error.name or "").startswith("vllm")
        raise _unfit(patch, f"importing it fails: {error}" if elsewhere else "it is not there") from error
    return owner, name, original


def _replacement(patch: Patch, original: Any) -> Any:
    """Our function for an original; raises where the original takes other parameters."""
    module, _, name = patch.replacement.partition(":")
    ours: Callable[..., Any] = getattr(import_module(f"{__package__}.{module}"), name)
    signature = inspect.signature(ours)
    named = list(signature.parameters.values())[1:]
    expected = [parameter.name for parameter in named if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    found = list(inspect.signature(original).parameters)
    if found[: len(expected)] != expected:
        raise _unfit(patch, f"it takes ({', '.join(found)}), not ({', '.join(expected)}, …)")

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    # vLLM reads what some of its methods take.
    replacement.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return replacement


def _replace(patch: Patch, owner: Any, name: str, original: Any, replacement: Any) -> None:
    setattr(replacement, _MARK, patch.target)
    setattr(owner, name, replacement)
    if patch.scope == "every_import":
        for other in list(sys.modules.values()):
            if getattr(other, "__name__", "").startswith("vllm.") and getattr(other, name, None) is original:
                setattr(other, name, replacement)


@cache
def _names_in_source(module_name: str) -> frozenset[str]:
    """``name`` and ``Class.name`` of all that a module's source binds, without what a class inherits; none where there
    is no such module."""
    source = _source_of(module_name)
    if source is None:
        return frozenset()
    module = symtable(source.read_text(encoding="utf-8"), str(source), "exec")
    classes = (scope for scope in module.get_children() if scope.get_type() == "class")
    members = (f"{scope.get_name()}.{name}" for scope in classes for name in _names_bound(scope))
    return frozenset(_names_bound(module)).union(members)


def _source_of(module_name: str) -> Path | None:
    """A module's file, found without importing the packages above it, as ``find_spec`` would."""
    top, *below = module_name.split(".")
    spec = find_spec(top)
    assert spec is not None
    place = Path(spec.origin or "").parent.joinpath(*below)
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def _names_bound(scope: SymbolTable) -> Iterator[str]:
    return (symbol.get_name() for symbol in scope.get_symbols() if symbol.is_assigned() or symbol.is_imported())


def _unfit(patch: Patch, what: str) -> IncompatibleVLLMError:
    return _changed(f"It changes {patch.target} to {patch.why}, but {what}")


def _changed(what: str) -> IncompatibleVLLMError:
    import vllm

    return IncompatibleVLLMError(
        f"vLLM {vllm.__version__} does not suit this dllm-engine. {what}; install a vLLM that this dllm-engine supports"
    )
