"""Links between pages lead somewhere, and every page of the documentation
can be found.
"""

import re
from pathlib import Path

import pytest

from tests.support.checkout import CHECKOUT, DOCS

PAGES = [
    *sorted(CHECKOUT.glob("*.md")),
    *sorted(DOCS.glob("*.md")),
    CHECKOUT / "benchmarks" / "results" / "README.md",
]
README_LINES = 150


def links(page: Path) -> list[str]:
    """Targets of a page's links and images, outside code."""
    text = re.sub(
        r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(
        r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE
    )


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT))
)
def test_links_lead_somewhere(page):
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_index_and_every_picture_is_shown():
    listed = {link.partition("#")[0] for link in links(DOCS / "README.md")}
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= listed
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page)}
    assert {*DOCS.glob("*.png"), *DOCS.glob("*.svg")} <= shown


def test_the_readme_is_read_in_three_minutes():
    assert (
        len((CHECKOUT / "README.md").read_text(encoding="utf-8").splitlines())
        <= README_LINES
    )
