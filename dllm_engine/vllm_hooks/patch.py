"""Replaces attributes of vLLM, after checking that they are what we expect."""

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal

from dllm_engine.vllm_hooks.release import IncompatibleVLLMError, unfit

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


def _unfit(patch: Patch, what: str) -> IncompatibleVLLMError:
    return unfit(f"It changes {patch.target} to {patch.why}, but {what}")
