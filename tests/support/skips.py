"""Skips that may remain, and why. Every run ends with them, one line per reason; a skip that is not listed fails it.

The hooks are those of `tests/conftest.py`. With pytest-xdist the process that reports is the one that counts.
"""

from collections import Counter

import pytest

ALLOWED = {
    "needs a GPU or TRITON_INTERPRET=1": "test_kernels_in_the_interpreter runs them in a process that has the variable",
    "needs a GPU": "the same cases run on a CPU; a GPU is not part of CI",
    "there is a GPU": "the refusal is for machines without one",
    "needs the programs chromium and chromedriver": (
        ".ci/run installs them where it is root on Debian; elsewhere its first lines say why not"
    ),
}
"""Reasons, and why they may be."""


def counted_skips(reporter: pytest.TerminalReporter) -> Counter[tuple[str, str]]:
    """The number of tests skipped, by reason, with the file where the reason is not listed."""
    counts: Counter[tuple[str, str]] = Counter()
    for report in reporter.stats.get("skipped", []):
        if not hasattr(report, "wasxfail"):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            counts["" if reason in ALLOWED else report.nodeid.split("::")[0], reason] += 1
    return counts


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")  # workers of pytest-xdist have none
    if reporter and exitstatus == pytest.ExitCode.OK and any(file for file, _ in counted_skips(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if counts := counted_skips(terminalreporter):
        terminalreporter.section("skipped, as tests/support/skips.py allows; others fail the run")
    for (file, reason), count in sorted(counts.items()):
        explained = f"FAILED, {file} is skipped without being listed" if file else ALLOWED[reason]
        terminalreporter.write_line(f"{count:4} {reason}: {explained}", red=bool(file))
