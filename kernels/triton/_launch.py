"""Launches of Triton kernels at the price of a launch."""

from typing import Any

# Kernels and their arguments have no types that mypy could know.
# mypy: allow-untyped-defs, allow-any-explicit


class Launch:
    """Launches of one kernel that differ in their grid, addresses and numbers alone.

    ``kernel[grid](...)`` finds out in each call which compiled kernel fits the types, alignments and values of its
    arguments. This takes the host 50 µs for a kernel of 30 arguments, longer than a small kernel runs. Here the first
    launch finds it for all later ones, so the caller has a ``Launch`` for each: pointers of other types or alignments,
    other constants or another device need another one, and the kernel may not specialise on its integers.
    """

    def __init__(self, constants: dict[str, Any], **options: int) -> None:
        """``constants``: the kernel's constant arguments, which come last, in its order. ``options``: of the compiler,
        such as ``num_warps``."""
        self.constants, self.options = constants, options
        self.compiled: Any = None

    def __call__(self, kernel: Any, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch ``kernel``, the same in every call, with the arguments before its constants."""
        if self.compiled is None:
            # Stays None in Triton's interpreter, which compiles nothing.
            self.compiled = kernel[grid](*arguments, **self.constants, **self.options)
        else:
            self.compiled[grid](*arguments, *self.constants.values())
