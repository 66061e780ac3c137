"""Snippets that stand for changed files."""

import pytest

from dllm_engine.decoding.probe import Logprobs
from dllm_engine.editors.merging import merged

FILE = """import os

def a():
    pass

def keep():
    return 7

def b():
    pass
    return 2
"""
KEPT = "# ... existing code ..."


def tokens_of(text):
    return [*text.encode()]


def result(original, snippet, best=None):
    """The merged file. ``best``: the place that the part makes most probable."""
    passes = merged(original, snippet, None if best is None else tokens_of)
    try:
        asked = [[-1.0]] * len(next(passes))
        asked[4 * best : 4 * best + 2] = [[0.0]] * 2
        passes.send([Logprobs(each, []) for each in asked])
    except StopIteration as end:
        return end.value
    raise AssertionError("one part has several places")


@pytest.mark.parametrize(
    ("snippet", "wanted"),
    [
        ("x = 1", "x = 1"),
        (
            f"import sys\nimport os\n{KEPT}",
            FILE.replace("import", "import sys\nimport", 1),
        ),
        (f"import sys\n{KEPT}", f"import sys\n{FILE}"),
        (f"{KEPT}\n    pass\n    return 3", FILE.replace("return 2", "return 3")),
        (f"{KEPT}\n\ndef c():\n    return 3\n", f"{FILE}\ndef c():\n    return 3\n"),
        (f"{KEPT}\nimport os\n{KEPT}\n\n{KEPT}", FILE),
        # What is nearest is meant by a line that the file has twice.
        (
            f"{KEPT}\n    pass\n    x = 1\n    return 2",
            FILE.replace("pass\n    return", "pass\n    x = 1\n    return"),
        ),
        # Changed first and last lines.
        (
            f"{KEPT}\ndef kept():\n    return 7\n\n{KEPT}",
            FILE.replace("keep", "kept"),
        ),
        # A new function between two that it is like.
        (
            f"{KEPT}\n    return 7\n\ndef new():\n    return 8\n\ndef b():\n{KEPT}",
            FILE.replace("7\n", "7\n\ndef new():\n    return 8\n"),
        ),
        # Lines between two that only this place has are removed.
        (
            f"{KEPT}\n    return 7\n    return 2",
            FILE.replace("\n\ndef b():\n    pass", ""),
        ),
    ],
)
def test_parts_take_the_place_of_lines_that_they_share(snippet, wanted):
    assert result(FILE, snippet) == wanted


@pytest.mark.parametrize("best", [0, 1])
def test_the_model_chooses_between_places_that_fit_equally_well(best):
    begins = (FILE.index("    pass"), FILE.rindex("    pass"))
    end = begins[best] + len("    pass\n")
    wanted = FILE[:end] + "    x = 1\n" + FILE[end:]
    assert result(FILE, f"{KEPT}\n    pass\n    x = 1\n{KEPT}", best) == wanted


def test_a_block_goes_between_two_others():
    new = "def c():\n    return 3\n"
    for best, behind in ((0, "import os\n\n"), (2, "return 7\n\n")):
        place = FILE.index(behind) + len(behind)
        wanted = f"{FILE[:place]}{new}\n{FILE[place:]}"
        assert result(FILE, f"{KEPT}\n\n{new}{KEPT}", best) == wanted


def test_other_lines_stay_as_they_are():
    odd = "a = 1  \r\n\f\r\nb = '\u2028'\r\nc = 3\r\n"
    wanted = odd.replace("c = 3", "x = 2\r\nc = 3")
    assert result(odd, f"{KEPT}\nb = '\u2028'\nx = 2\nc = 3\n{KEPT}") == wanted


@pytest.mark.parametrize(
    ("original", "part", "message"),
    [
        (FILE, "new()", "'new\\(\\)' shares no line"),
        (FILE, "new()\nimport os\nmore()\nlast()", "only a few within it"),
        (FILE, "        new():\n            x", "shares no line"),
        (FILE, "    pass\n    x = 1", "fits 2 places .* attends to the whole canvas"),
        ("x = 1\n" * 65, "x = 1\nanother()", "more than 64 times"),
    ],
)
def test_a_part_whose_place_nobody_can_tell_is_refused(original, part, message):
    with pytest.raises(ValueError, match=message):
        result(original, f"{KEPT}\n{part}\n{KEPT}")


def test_at_most_64_places_are_compared():
    blocks = "\n".join(
        f"def f{number}():\n    return {number}\n" for number in range(70)
    )
    with pytest.raises(ValueError, match=r"fits 70 places .* at most 64"):
        result(blocks, f"{KEPT}\n\ndef new():\n    pass\n\n{KEPT}", 0)
