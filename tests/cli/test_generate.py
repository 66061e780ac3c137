"""``dllm generate`` around an engine that the tests share."""

import json
import re
from typing import Any

import pytest

from dllm_engine.cli import engine
from dllm_engine.cli.main import main

PROMPTS = ["Hello!", "Reverse: Rome Tom Oslo", "Copy: Tom Rome", "Goodbye!", "Hi!"]


@pytest.fixture
def run(demo, monkeypatch, tmp_path):
    """``run(*arguments)``: the command, with the shared engine as the one it loads."""
    monkeypatch.setattr(engine, "load", lambda arguments: demo)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: main(["generate", *arguments])


def write_input(tmp_path, *lines):
    text = "\n".join(
        line if isinstance(line, str) else json.dumps(line) for line in lines
    )
    (tmp_path / "in.jsonl").write_text(text)
    return "--input in.jsonl --output out.jsonl".split()


def read_output(tmp_path):
    records = [
        json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    by_index = {record["index"]: record for record in records}
    assert len(by_index) == len(records)
    return by_index


def test_a_prompt_is_answered_on_stdout_and_its_figures_on_stderr(run, capsys):
    assert run("Hello!", "--figures") == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello! How can I help?\n"
    assert "prompt_tokens: " in printed.err
    assert "forward_passes: 8\n" in printed.err
    assert run("User: Hello!\nBot:", "--raw") == 0
    assert capsys.readouterr().out == "Hello! How can I help?\n", "without the template"


SCHEMA = {
    "type": "object",
    "properties": {"age": {"enum": [7, 48]}},
    "required": ["age"],
}


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--regex", "Ida=[0-9]{2}"], "Ida=[0-9]{2}"),
        (["--json-schema", "schema.json"], r'\{"age": ?(7|48)\}'),
    ],
)
def test_an_answer_matches_what_was_asked_for(
    run, tmp_path, capsys, arguments, pattern
):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    assert run("Ida=07. Give: Ida", *arguments) == 0
    assert re.fullmatch(pattern, capsys.readouterr().out.strip())
    lines = write_input(tmp_path, {"prompt": "Ida=07. Give: Ida"})
    assert run(*lines, *arguments) == 0
    assert re.fullmatch(pattern, read_output(tmp_path)[0]["text"])
    for other in (("--regex", "other"), ("--engine-arg", "seed=5", *arguments)):
        assert run(*lines, *other) == 2
        assert "other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json-schema", "none.json"], "neither a JSON object nor a file with one"),
        (["--json-schema", "list.json"], "holds a list, not an object"),
        ("--regex a --choice a,b".split(), "not allowed with argument"),
    ],
)
def test_what_asks_for_nothing_is_refused(run, tmp_path, capsys, arguments, message):
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(SystemExit):
        run("Hello!", *arguments)
    assert message in capsys.readouterr().err


def test_every_line_gets_one_record(run, tmp_path, demo):
    lines = [{"prompt": prompt, "id": f"p{i}"} for i, prompt in enumerate(PROMPTS)]
    messages: dict[str, Any] = {
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "id": "m",
    }
    arguments = write_input(tmp_path, *lines, messages)
    assert run(*arguments) == 0
    records = read_output(tmp_path)
    assert [records[i]["id"] for i in range(len(records))] == [
        line["id"] for line in (*lines, messages)
    ]
    answer = records[0]
    assert records[len(lines)]["token_ids"] == answer["token_ids"]
    assert answer["text"].strip() == "Hello! How can I help?"
    assert (
        demo.get_tokenizer().decode(answer["token_ids"], skip_special_tokens=True)
        == answer["text"]
    )
    assert answer["finish_reason"] == "stop"
    assert answer["figures"]["forward_passes"] == 8
    (tmp_path / "out.jsonl").unlink()
    assert run(*arguments, "--raw") == 1
    assert "chat template" in read_output(tmp_path)[len(lines)]["error"]


def test_bad_lines_get_an_error_and_stop_no_other(run, tmp_path, capsys):
    lines = [
        "{",
        {"prompt": "word " * 3000},
        {"promt": "Hello!"},
        {"prompt": "<|mdm_mask|>", "id": 4},
    ]
    assert run(*write_input(tmp_path, *lines, {"prompt": "Hello!"})) == 1
    records = read_output(tmp_path)
    assert [i for i in sorted(records) if "error" in records[i]] == [0, 1, 2, 3]
    assert "Invalid JSON" in records[0]["error"]
    assert "maximum context length" in records[1]["error"]
    assert "either 'prompt' or 'messages'" in records[2]["error"]
    assert "mask token" in records[3]["error"]
    assert records[3]["id"] == 4
    assert records[4]["text"].strip() == "Hello! How can I help?"
    assert "errors: 4" in capsys.readouterr().err


def test_a_second_run_has_nothing_to_do(run, tmp_path, monkeypatch):
    arguments = write_input(tmp_path, {"prompt": "Hello!"}, "{")
    assert run(*arguments) == 1
    before = (tmp_path / "out.jsonl").read_bytes()
    monkeypatch.setattr(engine, "load", None)  # not even an engine is started
    assert run(*arguments) == 1
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
    run, tmp_path, demo, monkeypatch
):
    """With a seed, each line draws its own numbers: equal prompts may differ, runs do
    not.
    """
    unheard_of = {
        "prompt": "zq vx kj 9? ww"
    }  # the model is unsure, so that draws differ
    arguments = [
        *write_input(tmp_path, *[unheard_of] * 6),
        "--temperature",
        "2",
        "--seed",
        "5",
    ]
    assert run(*arguments) == 0
    complete = read_output(tmp_path)
    assert len({tuple(record["token_ids"]) for record in complete.values()}) > 1
    (tmp_path / "out.jsonl").unlink()
    asked, add = [], demo.llm_engine.add_request

    def interrupted(*given, **options):
        asked.append(given)
        if len(asked) == 5:
            raise KeyboardInterrupt
        return add(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(demo.llm_engine, "add_request", interrupted)
        assert run(*arguments) == 130
    demo.llm_engine.abort_request(
        [*demo.llm_engine.output_processor.request_states], internal=True
    )
    kept = (tmp_path / "out.jsonl").read_bytes()
    assert 1 <= kept.count(b"\n") < 5
    (tmp_path / "out.jsonl").write_bytes(kept[:-10])  # killed amid a line
    assert run(*arguments) == 0
    assert read_output(tmp_path) == complete


REFUSED = {
    **dict.fromkeys(
        (
            "--gen-length=0",
            "--steps=9999",
            "--unmasking=quickly",
            "--threshold=nan",
            "--guided",
        ),
        "",
    ),
    **dict.fromkeys(
        (
            "--slow-fast={",
            "--temperature=-1",
            f"--seed={2**70}",
            "--regex=(a",
            "--template=no hole",
        ),
        "",
    ),
    '--json-schema={"type": "thing"}': "",
    "word " * 3000: "maximum context length",
    "<|mdm_mask|>": "mask token",
    "caf\udce9": "must be UTF-8",
}
"""Options and prompts, and what the error says where it is told."""


@pytest.mark.parametrize(("asked", "message"), REFUSED.items())
def test_what_cannot_be_answered_is_one_line(run, capsys, asked, message):
    assert run(*(["Hello!", asked] if asked.startswith("--") else [asked])) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("dllm: error: ")
    assert message in error
