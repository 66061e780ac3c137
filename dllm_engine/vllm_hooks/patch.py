"""How an attribute of vLLM is replaced: one function, which checks first that the attribute is what we expect."""

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal

Scope = Literal["attribute", "every_import", "if_imported"]
_MARK = "_dllm_engine_patch"


class PatchError(RuntimeError):
    """The installed vLLM lacks something that this package changes."""


@dataclass(frozen=True)
class Patch:
    """One attribute of vLLM that is replaced."""

    target: str
    """``module:attribute`` or ``module:Class.attribute``."""
    factory: str
    """``module:function`` of ours, relative to this package. It takes the original and returns the replacement."""
    parameters: str
    """The original's first parameters, which the replacement relies on; checked before anything is replaced."""
    why: str
    scope: Scope = "attribute"
    """``every_import``: also where a module of vLLM has imported the function by name. ``if_imported``: only where
    the module is loaded already."""


def apply(patches: Iterable[Patch]) -> None:
    """Replace the attributes. A second call changes nothing.

    Raises:
        PatchError: an attribute is missing or takes other parameters; names it and what it is needed for.
    """
    for patch in patches:
        module_name, _, path = patch.target.partition(":")
        if patch.scope != "if_imported" or module_name in sys.modules:
            _replace(patch, module_name, path)


def _replace(patch: Patch, module_name: str, path: str) -> None:
    owner_path, _, name = path.rpartition(".")
    try:
        module = import_module(module_name)
        owner = attrgetter(owner_path)(module) if owner_path else module
        original = vars(owner)[name]  # its own, not one that it inherits
    except (ImportError, AttributeError, KeyError) as error:
        raise _changed(patch, "it is not there") from error
    if hasattr(original, _MARK):
        return
    expected = [parameter.strip() for parameter in patch.parameters.split(",") if parameter.strip()]
    found = list(inspect.signature(original).parameters)
    if found[: len(expected)] != expected:
        raise _changed(patch, f"it takes ({', '.join(found)}), not ({patch.parameters}, …)")
    factory_module, _, factory_name = patch.factory.partition(":")
    factory: Callable[[Any], Any] = getattr(import_module(f"{__package__}.{factory_module}"), factory_name)
    replacement = factory(original)
    setattr(replacement, _MARK, patch.target)
    setattr(owner, name, replacement)
    if patch.scope == "every_import":
        for other in list(sys.modules.values()):
            if getattr(other, "__name__", "").startswith("vllm.") and getattr(other, name, None) is original:
                setattr(other, name, replacement)


def _changed(patch: Patch, what: str) -> PatchError:
    import vllm

    return PatchError(
        f"vLLM {vllm.__version__} does not suit this dllm-engine. It changes {patch.target} to {patch.why}; {what}; "
        "install a vLLM that this dllm-engine supports"
    )
