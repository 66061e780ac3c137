"""Access to the carried reference cases (``tests/reference``)."""

import json
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parents[1] / "reference"
Case = dict[str, Any]


def reference_cases(method: str) -> list[Case]:
    return json.loads((REFERENCE / f"{method}.json").read_text())


def request_fields(case: Case) -> dict[str, Any]:
    """What a case asks for, as fields of ``DiffusionParams``."""
    h = case["hyperparameters"]
    fields = {
        "gen_length": h["gen_length"],
        "block_length": h.get("block_length", h["gen_length"]),
        "steps": h["steps"],
        "unmasking": h.get("alg", "low_confidence"),
        "ignore_eos": True,
    }
    return fields | {name: h[name] for name in ("top_p", "top_k") if h.get(name) is not None}
