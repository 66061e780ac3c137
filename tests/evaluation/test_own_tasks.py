"""A user's own tasks: files, and when a response is right."""

import pytest

from dllm_engine.demo.tasks import TASKS
from dllm_engine.evaluation.own_tasks import DEMO_TASKS, MATCHES, demo_tasks, read_tasks


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n", "holds no tasks"),
        ("nonsense", "task 1 must be"),
        ("caf\udce9", "tasks.jsonl: task 1 must be .* Invalid JSON"),
        ('{"prompt": "x", "answer": "y"}\n\n{"prompt": "x"}', "task 3 must be .* answer: Field required"),
        ('{"answer": "x"}', "prompt: Field required"),
        ('{"prompt": "x", "answer": 3}', "answer: Input should be a valid string"),
        ('{"prompt": 3, "answer": "x"}', "prompt: Input should be a valid string; prompt: Input"),
    ],
)
def test_a_line_that_is_no_task_is_named(tmp_path, content, message):
    file = tmp_path / "tasks.jsonl"
    file.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        read_tasks(file)


@pytest.mark.parametrize(
    ("match", "response", "answer", "is_right"),
    [
        ("exact", " Oslo\n", "Oslo", True),
        ("exact", "Oslo.", "Oslo", False),
        ("contains", "It is Oslo.", "Oslo", True),
        ("contains", "It is Rome.", "Oslo", False),
        ("last-number", "4 + 5 = 9, so $1,009.0.", "He has 1,009\n#### 1009", True),
        ("last-number", "It is -3.", "3", False),
        ("last-number", "no idea", "3", False),
        ("last-number", "no idea", "none either", False),
    ],
)
def test_matches(match, response, answer, is_right):
    assert MATCHES[match](response, answer) is is_right


def test_an_unknown_task_is_refused_with_all_that_there_are():
    with pytest.raises(ValueError, match=r"unknown task 'nams'; did you mean 'names'\?") as error:
        demo_tasks("nams", 1, 0)
    for name in (DEMO_TASKS, *TASKS, "FILE.jsonl", "--lm-eval"):
        assert name in str(error.value)
