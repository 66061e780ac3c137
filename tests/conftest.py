"""How the tests run, and which may be skipped. Their fixtures are in
``tests/support/fixtures.py``.
"""

import os

# One process: tests look into the scheduler and the runner. Read when the first engine
# starts.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# vLLM's kernel of experts would round float32 to TF32 on a GPU.
os.environ["TRITON_F32_DEFAULT"] = "ieee"
# Processes of a run would all bind to the same cores, and sums depend on the number of
# threads.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As ``dllm serve`` sets it.
os.environ.setdefault("VLLM_MAX_STOP_STRINGS", "64")

from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A machine that is busy is no reason to fail.
hypothesis.settings.register_profile("dllm", deadline=None, max_examples=80)
hypothesis.settings.load_profile("dllm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--red-team",
        type=int,
        default=1,
        metavar="N",
        help="draw N times as many random cases in tests/red_team",
    )


def pytest_configure(config: pytest.Config) -> None:
    # With pytest-xdist, the first process runs no test, and need not wait until vLLM is
    # imported.
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption(
        "numprocesses", None
    ):
        config.pluginmanager.import_plugin("tests.support.fixtures")


IN_ONE_PROCESS = {
    "tests/red_team/test_hostile_requests.py": "tests/serving/test_load.py",
    "tests/serving/test_editors.py": "tests/serving/test_load.py",
    "tests/serving/test_one_against_all.py": "tests/serving/test_load.py",
    "tests/serving/test_model_servers.py": "tests/serving/test_playground.py",
}
"""Files whose tests share with those of another file what takes long to start: a
server, or the process that has imported vLLM and that ranks are forked from."""


TAKES_LONGEST = (
    "tests/distributed/",
    "tests/docs/",
    "tests/red_team/",
    "tests/serving/",
)
"""Folders of the files that start most processes, and of those that share them. They
run first, so that no worker is left with one of them at the end."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m slow``, files without slow tests are not imported: that takes seconds
    in each process.
    """
    is_test_file = config.option.markexpr == "slow" and collection_path.match(
        "test_*.py"
    )
    return (
        True
        if is_test_file
        and "mark.slow" not in collection_path.read_text(encoding="utf-8")
        else None
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(TAKES_LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, files that share a server run in one process as well.
    (``--dist loadgroup`` of pytest-xdist 3.8 does not group under pytest 9.2.)"""
    from xdist.scheduler import LoadFileScheduling

    class LoadServerScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return IN_ONE_PROCESS.get(file, file)

    return (
        LoadServerScheduling(config, log)
        if config.getvalue("dist") == "loadfile"
        else None
    )


ALLOWED_SKIPS = {
    "needs a GPU or TRITON_INTERPRET=1": (
        "test_kernels_in_the_interpreter runs them in a process that has the variable"
    ),
    "vLLM's kernels for 4 bits need AVX-512": (
        "this processor has none; that the engine refuses is tested"
    ),
    "vLLM 0.33 refuses such a file itself": "the tests run with vLLM 0.32 in CI",
    "there is a GPU": "the refusal is for machines without one",
    "needs the programs chromium and chromedriver": (
        ".ci/run installs them where it is root on Debian; elsewhere its first lines "
        "say why not"
    ),
}
"""Reasons of skips that may remain, and why. Every run ends with them, one line per
reason; a skip that is not listed fails it. With pytest-xdist the process that reports
is the one that counts."""


def counted_skips(reporter: pytest.TerminalReporter) -> Counter[tuple[str, str]]:
    """The number of tests skipped, by reason, with the file where the reason is not
    listed.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for report in reporter.stats.get("skipped", []):
        if not hasattr(report, "wasxfail"):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            counts[
                "" if reason in ALLOWED_SKIPS else report.nodeid.split("::")[0], reason
            ] += 1
    return counts


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin(
        "terminalreporter"
    )  # workers of pytest-xdist have none
    if (
        reporter
        and exitstatus == pytest.ExitCode.OK
        and any(file for file, _ in counted_skips(reporter))
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if counts := counted_skips(terminalreporter):
        terminalreporter.section(
            "skipped, as tests/conftest.py allows; others fail the run"
        )
    for (file, reason), count in sorted(counts.items()):
        explained = (
            f"FAILED, {file} is skipped without being listed"
            if file
            else ALLOWED_SKIPS[reason]
        )
        terminalreporter.write_line(f"{count:4} {reason}: {explained}", red=bool(file))
