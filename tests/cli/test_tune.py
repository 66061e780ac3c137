"""``dllm tune`` searches, writes what it found, goes on with it; and ``dllm serve``
takes it.
"""

import json

import pytest

from dllm_engine.cli.main import main
from dllm_engine.evaluation import tuning

NARROW = ("--methods none --unmasking-rules threshold=0.9 --batch 2 --budget 1").split()


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name in ("WINDOWS", "BLOCK_LENGTHS"):
        monkeypatch.setattr(tuning, name, ())


def tuned(output, *arguments):
    return main(["tune", "demo", "--output", str(output), *NARROW, *arguments])


def test_it_finds_something_faster_and_goes_on_from_its_file(started, tmp_path, capsys):
    output = tmp_path / "tune.json"
    assert tuned(output, "--tasks", "reverse", "--count", "12", "--loss", "20") == 0
    printed = capsys.readouterr().out
    assert "Chosen: " in printed
    assert "threshold=0.9" in printed
    (line,) = (
        line.split()
        for line in printed.splitlines()
        if line.startswith("    dllm serve")
    )
    assert line[:5] == "dllm serve demo --cache-method none".split()
    assert line[5:] == ["--threshold", "0.9"]
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    written = json.loads(output.read_text())
    assert written["subject"]["model"] == "demo"
    plain = written["rows"][0]
    assert (plain["method"], plain["unmasking"], plain["result"]["examples"]) == (
        "none",
        "one",
        12,
    )
    chosen = written["chosen"]
    assert chosen["decoding"]["threshold"] == 0.9
    assert chosen["tokens_per_second"] > chosen["plain_tokens_per_second"] > 0
    assert {arguments["max_num_seqs"] for arguments in started} == {2}

    started.clear()
    assert tuned(output, "--tasks", "reverse", "--count", "12", "--loss", "20") == 0
    assert started == []
    assert json.loads(output.read_text())["rows"] == written["rows"]


def test_tasks_of_ones_own_may_be_messages(started, tmp_path, capsys):
    file = tmp_path / "tasks.jsonl"
    output = tmp_path / "tune.json"
    right = '{"prompt": "Reverse: Rome Tom Oslo", "answer": "Oslo Tom Rome"}\n'
    message = (
        '{"prompt": [{"role": "user", "content": "Copy: Rome Tom"}], "answer": " Rome '
        'Tom "}\n'
    )
    file.write_text(
        right + message + '{"prompt": "Copy: Rome Ida", "answer": "never said"}\n'
    )
    asked = f"--tasks {file} --gen-length 16 --loss 40".split()
    assert tuned(output, *asked) == 0
    written = json.loads(output.read_text())
    assert sorted(written["rows"][0]["result"]["details"]["scores"]) == [0, 1, 1]
    assert written["subject"]["decoding"] == {"gen_length": 16}
    file.write_text(right)
    assert tuned(output, *asked) == 2
    assert "choose another --output" in capsys.readouterr().err


def test_an_interruption_leaves_what_was_measured(
    started, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "tune.json"

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning.Space, "varied", interrupt)
    assert tuned(output, "--tasks", "reverse", "--count", "6") == 130
    printed = capsys.readouterr()
    assert "Chosen: none one, " in printed.out
    assert "dllm: interrupted" in printed.err
    assert json.loads(output.read_text())["chosen"]["decoding"] == {}
