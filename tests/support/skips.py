"""Skips that may remain, and why. Every run ends with them, one line per reason; a skip that is not listed fails it.

The hooks are those of `tests/conftest.py`. With pytest-xdist the process that reports is the one that counts.
"""

from collections import Counter
from fnmatch import fnmatch

import pytest

ALLOWED = {
    ("tests/kernels/*_triton.py", "needs a GPU or TRITON_INTERPRET=1"): (
        "test_kernels_in_the_interpreter runs them in a process that has the variable"
    ),
    ("tests/*", "needs a GPU"): "the same cases run on a CPU; a GPU is not part of CI",
    ("tests/*", "there is a GPU"): "the refusal is for machines without one",
    ("tests/serving/test_playground.py", "needs the programs chromium and chromedriver"): (
        ".ci/run installs them where it is root on Debian; elsewhere its first lines say why not"
    ),
}
"""Files and reasons (patterns of `fnmatch`), and why it may be."""


def allowed_skip(file: str, reason: str) -> tuple[str, str] | None:
    """The entry that allows a skip, or None."""
    return next((entry for entry in ALLOWED if fnmatch(file, entry[0]) and fnmatch(reason, entry[1])), None)


def counted_skips(reporter: pytest.TerminalReporter) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """How many tests were skipped by each entry of the list, and by file and reason outside of it."""
    listed: Counter[tuple[str, str]] = Counter()
    unlisted: Counter[tuple[str, str]] = Counter()
    for report in reporter.stats.get("skipped", []):
        if not hasattr(report, "wasxfail"):
            skip = report.nodeid.split("::")[0], report.longrepr[2].removeprefix("Skipped: ")
            entry = allowed_skip(*skip)
            (unlisted if entry is None else listed)[entry or skip] += 1
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
            terminalreporter.write_line(f"{count:4} {entry[1]}: {ALLOWED[entry]}")
    if unlisted:
        terminalreporter.section("FAILED: skips that tests/support/skips.py does not list", red=True, bold=True)
        for (file, reason), count in unlisted.items():
            terminalreporter.write_line(f"{count:4} {file}: {reason}")
