"""No test is skipped without being named, and none for a reason that is not listed."""

import pytest

from tests.support.skips import allowed_skip

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_one():
    pass

@pytest.mark.skip(reason="needs a GPU")
@pytest.mark.parametrize("number", range(3))
def test_on_a_gpu(number):
    pass

@pytest.mark.xfail
def test_that_fails():
    assert False
"""


@pytest.mark.parametrize("processes", [[], pytest.param(["-n", "1"], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("added", "status", "lines"),
    [
        ("", 0, ["   3 needs a GPU: *"]),
        ("@pytest.mark.skip(reason='no time')\ndef test_more(): pass", 1, ["*FAILED: skips*", "   1 tests/*: no time"]),
        ("pytest.importorskip('nowhere')", 1, ["*FAILED: skips*", "*could not import 'nowhere'*"]),
    ],
    ids=["listed", "unlisted", "a whole file"],
)
def test_a_run_names_its_skips_and_fails_by_an_unlisted_one(pytester, processes, added, status, lines):
    pytester.mkdir("tests").joinpath("test_some.py").write_text(TESTS + added)
    pytester.path.joinpath("tests", "test_other.py").write_text("def test_other(): pass")
    result = pytester.runpytest_inprocess("-p", "tests.support.skips", *processes)
    assert result.ret == status
    result.stdout.fnmatch_lines(lines)


@pytest.mark.parametrize(
    ("file", "reason", "allowed"),
    [
        ("tests/kernels/test_rotary_triton.py", "needs a GPU or TRITON_INTERPRET=1", True),
        ("tests/kernels/test_rotary.py", "needs a GPU or TRITON_INTERPRET=1", False),
        ("tests/serving/test_playground.py", "needs the programs chromium and chromedriver", True),
        ("tests/serving/test_http.py", "needs a GPU", True),
        ("tests/serving/test_http.py", "could not import 'ray': No module named 'ray'", False),
    ],
)
def test_an_entry_is_for_its_files_and_its_reason(file, reason, allowed):
    assert (allowed_skip(file, reason) is not None) is allowed
