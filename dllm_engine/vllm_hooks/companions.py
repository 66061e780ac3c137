"""PyTorch's companion packages, which transformers imports where they are installed, and their errors in one sentence.

A companion of another build than PyTorch's ends the import of vLLM, whatever the model. This module imports nothing of
vLLM, because vLLM is only half imported then.
"""

import functools
import importlib.metadata
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def broken_companion(error: BaseException) -> str | None:
    """The sentence for an error that was raised while a companion was imported; None for others."""
    modules = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)}
    packages = {module.partition(".")[0] for module in modules}
    for name in COMPANIONS:
        if name in packages:
            return (
                f"{name} {_version(name)} does not load with PyTorch {_version('torch')} ({error}): it is of another "
                f"build. No model of this package needs it; run pip uninstall {' '.join(COMPANIONS)}"
            )
    return None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown)"


def explain_uncaught(sentence_of: Callable[[BaseException], str | None]) -> None:
    """Show the sentence that ``sentence_of`` has for an error that ends the program, in place of a traceback."""
    show = sys.excepthook

    def show_the_sentence(
        kind: type[BaseException], error: BaseException, traceback_of_error: TracebackType | None
    ) -> None:
        if (sentence := sentence_of(error)) is None:
            show(kind, error, traceback_of_error)
        else:
            print(sentence, file=sys.stderr)

    sys.excepthook = show_the_sentence


@functools.cache
def explain_broken_companions() -> None:
    """Show the sentence where a broken companion ends the program."""
    explain_uncaught(broken_companion)
