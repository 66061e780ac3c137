"""``dllm tune`` searches, writes what it found, goes on with it; and ``dllm serve`` takes it."""

import json
from pathlib import Path

import pytest

from dllm_engine.cli.main import build_parser, main
from dllm_engine.cli.serve import vllm_arguments
from dllm_engine.evaluation import tuning
from dllm_engine.evaluation.result_file import SCHEMA

NARROW = ["--methods", "none", "--unmasking-rules", "threshold=0.9", "--batch", "2", "--budget", "1"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Fewer settings."""
    for name in ("WINDOWS", "BLOCK_LENGTHS"):
        monkeypatch.setattr(tuning, name, ())


def tuned(output, *arguments):
    return main(["tune", "demo", "--output", str(output), *NARROW, *arguments])


def served(*argv):
    """The engine options and request defaults of a `dllm serve` command line."""
    args, args.unknown = build_parser().parse_known_args(["serve", *argv])
    words = vllm_arguments(args)
    return json.loads(words[words.index("--additional-config") + 1])["dllm"]


def test_it_finds_something_faster_which_serve_takes_and_goes_on_from_its_file(started, tmp_path, capsys):
    output = tmp_path / "tune.json"
    assert tuned(output, "--tasks", "reverse", "--count", "12", "--loss", "20") == 0
    printed = capsys.readouterr().out
    assert "Chosen: " in printed
    assert "threshold=0.9" in printed
    (line,) = (line.split() for line in printed.splitlines() if line.startswith("    dllm serve"))
    assert line[:3] == ["dllm", "serve", "demo"]
    assert served("demo", "--settings", str(output)) == {"cache_options": {}} | served(*line[2:])
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    written = json.loads(output.read_text())
    assert written["subject"]["model"] == "demo"
    plain = written["rows"][0]
    assert (plain["method"], plain["unmasking"], plain["result"]["examples"]) == ("none", "one", 12)
    chosen = written["chosen"]
    assert chosen["decoding"]["threshold"] == 0.9
    assert chosen["tokens_per_second"] > chosen["plain_tokens_per_second"] > 0
    assert {arguments["max_num_seqs"] for arguments in started} == {2}

    started.clear()
    assert tuned(output, "--tasks", "reverse", "--count", "12", "--loss", "20") == 0
    assert started == []
    assert json.loads(output.read_text())["rows"] == written["rows"]


def test_tasks_of_ones_own_may_be_messages(started, tmp_path, capsys):
    file, output = tmp_path / "tasks.jsonl", tmp_path / "tune.json"
    right = '{"prompt": "Reverse: Rome Tom Oslo", "answer": "Oslo Tom Rome"}\n'
    message = '{"prompt": [{"role": "user", "content": "Copy: Rome Tom"}], "answer": " Rome Tom "}\n'
    file.write_text(right + message + '{"prompt": "Copy: Rome Ida", "answer": "never said"}\n')
    asked = ["--tasks", str(file), "--gen-length", "16", "--loss", "40"]
    assert tuned(output, *asked) == 0
    written = json.loads(output.read_text())
    assert sorted(written["rows"][0]["result"]["details"]["scores"]) == [0, 1, 1]
    assert written["subject"]["decoding"] == {"gen_length": 16}
    file.write_text(right)
    assert tuned(output, *asked) == 2
    assert "choose another --output" in capsys.readouterr().err


def test_an_interruption_leaves_what_was_measured(started, tmp_path, monkeypatch, capsys):
    output = tmp_path / "tune.json"

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning.Space, "varied", interrupt)
    assert tuned(output, "--tasks", "reverse", "--count", "6") == 130
    printed = capsys.readouterr()
    assert "Chosen: none one, " in printed.out
    assert "dllm: interrupted" in printed.err
    assert json.loads(output.read_text())["chosen"]["decoding"] == {}


# The result in `dllm serve`


SPARSE = {"cache_method": "sparse", "cache_options": {"retention_ratio": 0.25}}
CHOSEN = {"factor": 1.0, "block_add_threshold": 0.5, "block_length": 16}


@pytest.fixture
def settings(tmp_path):
    """A result."""
    file = tmp_path / "tune.json"
    result = {"schema": SCHEMA, "subject": {"model": "demo"}, "chosen": {"engine": SPARSE, "decoding": CHOSEN}}
    file.write_text(json.dumps(result))
    return str(file)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], SPARSE | {"request_defaults": CHOSEN}),
        (["--retention-ratio", "0.5", "--page-size", "16"],
         SPARSE | {"cache_options": {"retention_ratio": 0.5}, "page_size": 16, "request_defaults": CHOSEN}),
        (["--cache-method", "dual"], {"cache_method": "dual", "request_defaults": CHOSEN}),
        # A rule takes the place of another, a length that of the other length.
        (["--threshold", "0.8", "--block-length", "8"],
         SPARSE | {"request_defaults": {"threshold": 0.8, "block_add_threshold": 0.5, "block_length": 8}}),
        (["--additional-config", '{"dllm": {"cache_method": "none"}}'],
         {"cache_method": "none", "request_defaults": CHOSEN}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_other_arguments_stand_above_the_settings(settings, arguments, expected):
    assert served("demo", "--settings", settings, *arguments) == expected


def test_settings_of_another_model_are_a_warning(settings, capsys):
    assert served("some/model", "--settings", settings)["cache_method"] == "sparse"
    assert "was made with model demo, this is some/model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "is not JSON"),
        ("{}", "is no result of this version's `dllm tune`"),
        (json.dumps({"schema": SCHEMA, "subject": {}}), "has no chosen setting yet"),
    ],
)
def test_what_is_no_settings_file_is_refused(settings, content, message):
    Path(settings).write_text(content)
    with pytest.raises(ValueError, match=message):
        served("demo", "--settings", settings)
