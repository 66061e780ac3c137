"""Writes the readme of the package: README.md with links that lead into the repository
from anywhere. All else is in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

FOLDER = Path(__file__).parent


def readme(repository: str) -> str:
    """README.md with addresses in place of paths; pictures as they are stored."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    link = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#)([^)\s]+)\)")

    def written_out(match: re.Match[str]) -> str:
        mark, label, path = match.groups()
        return f"{mark}{label}({repository}/{'raw' if mark else 'blob'}/main/{path})"

    return link.sub(written_out, text)


if __name__ == "__main__":
    with (FOLDER / "pyproject.toml").open("rb") as file:
        urls = tomllib.load(file)["project"]["urls"]
    setup(
        long_description=readme(urls["Repository"]),
        long_description_content_type="text/markdown",
    )
