"""Skips that may remain, and why. Every run ends with them, one line per reason; a skip that is not listed fails it.

The hooks are those of `tests/conftest.py`. With pytest-xdist the process that reports is the one that counts.
"""

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch

import pytest


@dataclass(frozen=True)
class AllowedSkip:
    """Tests in ``files`` may be skipped for ``reason`` (both are patterns of `fnmatch`)."""

    files: str
    reason: str
    why: str


ALLOWED = (
    AllowedSkip(
        "tests/kernels/*_triton.py",
        "needs a GPU or TRITON_INTERPRET=1",
        "test_kernels_in_the_interpreter runs them in a process that has the variable",
    ),
    AllowedSkip("tests/*", "needs a GPU", "the same cases run on a CPU; a GPU is not part of CI"),
    AllowedSkip("tests/*", "there is a GPU", "the refusal is for machines without one"),
    AllowedSkip(
        "tests/serving/test_playground.py",
        "needs the programs chromium and chromedriver",
        ".ci/run installs them where it is root on Debian; elsewhere its first lines say why not",
    ),
)


def where_and_why(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str]:
    """The file of a test that was skipped, relative to the checkout, and the reason given."""
    assert isinstance(report.longrepr, tuple)
    return report.nodeid.split("::")[0], report.longrepr[2].removeprefix("Skipped: ")


def allowed_skip(file: str, reason: str) -> AllowedSkip | None:
    """The entry that allows a skip, or None."""
    return next((entry for entry in ALLOWED if fnmatch(file, entry.files) and fnmatch(reason, entry.reason)), None)


def counted_skips(reporter: pytest.TerminalReporter) -> tuple[Counter[AllowedSkip], Counter[tuple[str, str]]]:
    """How many tests were skipped by each entry of the list, and by file and reason outside of it."""
    listed: Counter[AllowedSkip] = Counter()
    unlisted: Counter[tuple[str, str]] = Counter()
    for report in reporter.stats.get("skipped", []):
        if hasattr(report, "wasxfail"):
            continue
        file, reason = where_and_why(report)
        if entry := allowed_skip(file, reason):
            listed[entry] += 1
        else:
            unlisted[file, reason] += 1
    return listed, unlisted


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")  # workers of pytest-xdist have none
    if reporter and exitstatus == pytest.ExitCode.OK and counted_skips(reporter)[1]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    listed, unlisted = counted_skips(terminalreporter)
    if listed:
        terminalreporter.section("skipped, as tests/support/skips.py allows")
        for entry, count in listed.items():
            terminalreporter.write_line(f"{count:4} {entry.reason}: {entry.why}")
    if unlisted:
        terminalreporter.section("FAILED: skips that tests/support/skips.py does not list", red=True, bold=True)
        for (file, reason), count in unlisted.items():
            terminalreporter.write_line(f"{count:4} {file}: {reason}")
