"""Tables as JSON."""

import json

import pytest

from dllm_engine.text import json_rows

REPORT = {"name": "a\nb", "rows": [{"x": 1, "of": [1, 2]}, {"x": 2, "of": []}], "nothing": {}}


@pytest.mark.parametrize("depth", range(5))
def test_any_depth_is_the_same_json(depth):
    assert json.loads(json_rows(REPORT, depth)) == REPORT


def test_rows_at_the_depth_have_a_line_each():
    assert json_rows(REPORT, 2).splitlines() == [
        "{",
        ' "name": "a\\nb",',
        ' "rows": [',
        '  {"x": 1, "of": [1, 2]},',
        '  {"x": 2, "of": []}',
        " ],",
        ' "nothing": {}',
        "}",
    ]
