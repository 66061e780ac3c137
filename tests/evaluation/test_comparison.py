"""The file of a comparison: one run writes it at a time, and one that cannot be written
is refused at the start.
"""

import json

import pytest

from dllm_engine.evaluation.comparison import Combination, Comparison, Result, Task

PLAIN = Combination("none", "one", {"cache_method": "none", "cache_options": {}}, {})


class Named(Task):
    """A task that is not asked."""

    def score(self, engine, decoding):
        raise AssertionError


def measure(comparison, name):
    """Fill a row, as ``run`` does."""
    (row,) = comparison.add([PLAIN], [Named(name)])
    row.result = Result("exact", 1.0, None, 1)
    comparison.save()


@pytest.fixture
def output(tmp_path):
    return tmp_path / "rows.json"


def tasks_in(output):
    return [row["task"] for row in json.loads(output.read_text())["rows"]]


def test_two_runs_cannot_write_one_output_and_the_next_one_keeps_the_rows_of_both(
    output,
):
    with Comparison(output, "eval", {}, load=None) as first:
        measure(first, "a")
        with pytest.raises(ValueError, match=r"another run is writing .*rows\.json"):
            Comparison(output, "eval", {}, load=None)
        measure(first, "b")
    with Comparison(output, "eval", {}, load=None) as second:
        measure(second, "c")
    assert sorted(tasks_in(output)) == ["a", "b", "c"]
    assert [path.name for path in output.parent.iterdir()] == ["rows.json"]


def test_an_output_that_was_refused_is_not_locked(output):
    output.write_text('{"subject": {"schema": 0}}')
    with pytest.raises(ValueError, match="choose another --output"):
        Comparison(output, "eval", {}, load=None)
    output.unlink()
    with Comparison(output, "eval", {}, load=None) as comparison:
        measure(comparison, "a")
    assert tasks_in(output) == ["a"]


@pytest.mark.parametrize("blocked", ["rows.json", "rows.json.lock"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(
    output, blocked
):
    (output.parent / blocked).mkdir()
    with pytest.raises(
        ValueError, match=f"cannot write .*rows.json: .*{blocked}: Is a directory"
    ):
        Comparison(output, "eval", {}, load=None)
