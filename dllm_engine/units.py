"""Sizes in bytes, as people write and read them."""

import re

_UNITS = {
    "": 1,
    "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40,
}  # fmt: skip


def parse_size(text: str) -> int:
    """Bytes from ``80GiB``, ``24GB``, ``512MiB`` or a plain number; raises ``ValueError`` for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-zA-Z]*)", text.strip())
    unit = match[2].upper().removesuffix("B") if match else ""
    if match is None or unit not in _UNITS:
        raise ValueError(f"{text!r} must be a size such as 80GiB, 24GB or 512MiB")
    return int(float(match[1]) * _UNITS[unit])


def readable_size(number: float) -> str:
    """Three figures and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
