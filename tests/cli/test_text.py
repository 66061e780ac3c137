"""Tables as JSON."""

import json

from dllm_engine.text import json_rows

REPORT = {"name": "a\nb", "rows": [{"x": 1, "of": [1, 2]}, {"x": 2, "of": []}], "nothing": {}}


def test_rows_at_the_depth_have_a_line_each():
    assert all(json.loads(json_rows(REPORT, depth)) == REPORT for depth in range(5))
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
