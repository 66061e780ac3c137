"""Folders of the checkout."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
DOCS = CHECKOUT / "docs"
EXAMPLES = CHECKOUT / "examples"
REFERENCE = CHECKOUT / "tests" / "reference"
