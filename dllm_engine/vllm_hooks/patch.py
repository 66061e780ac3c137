"""Replacement of functions of vLLM, with a check of their parameters."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from dllm_engine.vllm_hooks.release import unfit

Original = Callable[..., Any]
"""vLLM's function, which ours replaces."""
_MARK = "_dllm_engine_patch"


def is_ours(owner: Any) -> bool:
    """Return True if an object of vLLM serves one of our models. It must have a
    ``vllm_config`` or a ``model_config``.
    """
    model_config = getattr(getattr(owner, "vllm_config", owner), "model_config", None)
    return getattr(model_config, "is_dllm_engine", False)


def apply(replacements: Mapping[str, str]) -> None:
    """Replace all functions or none, also in modules of vLLM that have imported one. A
    second call changes nothing. Raises ``IncompatibleVLLMError`` naming a function that
    is missing or has other parameters.

    ``replacements`` maps ``module:function`` or ``module:Class.function`` of vLLM to
    ``module:function`` in this package. Our function is called with the original and
    with its arguments. It must name the original's first parameters.
    """
    new = []
    for target, path in replacements.items():
        owner, name, original = _original(target)
        if not hasattr(_function(original), _MARK):
            new.append((owner, name, original, _replacement(target, path, original)))
    for owner, name, original, replacement in new:
        setattr(owner, name, replacement)
        for other in (
            list(sys.modules.values()) if isinstance(owner, ModuleType) else ()
        ):
            if (
                getattr(other, "__name__", "").startswith("vllm.")
                and getattr(other, name, None) is original
            ):
                setattr(other, name, replacement)


def _original(target: str) -> tuple[Any, str, Any]:
    """The owner of a function, the function's name and the function."""
    module, _, path = target.partition(":")
    owner_path, _, name = path.rpartition(".")
    try:
        owner = resolve_name(f"{module}:{owner_path}")
        return owner, name, vars(owner)[name]  # its own function, not an inherited one
    except (ImportError, AttributeError, KeyError) as error:
        raise unfit(f"It replaces {target}, which is not there: {error}") from error


def _function(original: Any) -> Any:
    return original.__func__ if isinstance(original, classmethod) else original


def _replacement(target: str, path: str, replaced: Any) -> Any:
    """The replacement of a function. Raises an error if the original has other
    parameters.
    """
    original = _function(replaced)
    ours: Callable[..., Any] = resolve_name(f"{__package__}.{path}")
    named = list(inspect.signature(ours).parameters.values())[1:]
    expected = [
        parameter.name
        for parameter in named
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    names = list(inspect.signature(original).parameters)
    if names[: len(expected)] != expected:
        raise unfit(
            f"It replaces {target}, which takes ({', '.join(names)}), not "
            f"({', '.join(expected)}, …)"
        )

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    setattr(replacement, _MARK, target)
    return classmethod(replacement) if original is not replaced else replacement
