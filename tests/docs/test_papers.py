"""``docs/papers.md`` lists the papers' tables, and how each is made, as ``paper_tasks.toml`` has them.

To write it anew: ``python -m tests.docs.test_papers``
"""

from pathlib import Path

from dllm_engine.evaluation.paper_tasks import PAPER_TABLES, PAPERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "papers.md"
BEGIN = "<!-- the tables, by python -m tests.docs.test_papers -->\n"


def written() -> str:
    """The page: its own words, then a table per paper."""
    words = PAGE.read_text(encoding="utf-8").partition(BEGIN)[0]
    return words + BEGIN + "".join(_paper(name, title) for name, title in PAPERS.items())


def _paper(name: str, title: str) -> str:
    head = "| `--paper-table` | compares | models | missing, or not as in the paper |\n|---|---|---|---|\n"
    return (
        f"\n## {title}\n" + head + "".join(_row(key) for key, table in PAPER_TABLES.items() if table["paper"] == name)
    )


def _row(key: str) -> str:
    table = PAPER_TABLES[key]
    name = f"`{key}`" if table["benchmarks"] else table["name"].replace("-", " ").capitalize()
    return f"| {name} | {table['about']} | {table.get('models', '–')} | {table.get('without', '–')} |\n"


def test_the_page_is_that_of_the_presets():
    assert written() == PAGE.read_text(encoding="utf-8"), "update it: python -m tests.docs.test_papers"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
