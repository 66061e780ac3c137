"""Input and output files of a batch run: an interrupted run goes on, nothing is lost or
doubled.
"""

import json
import multiprocessing
import resource
import signal

import pytest

from dllm_engine.batch import (
    BatchRequest,
    InputLine,
    ResultFile,
    read_input,
    settings_digest,
)
from dllm_engine.text import one_line

SETTINGS = settings_digest({"model": "demo"})
LINES = [InputLine(index, b'{"prompt": "Say %d"}' % index) for index in (0, 1, 3)]


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


def write(output, lines, **fields):
    """A run that finishes every pending line."""
    with ResultFile(output, lines, SETTINGS) as results:
        for line in results.pending:
            results.append([(line, fields or {"text": f"said {line.index}"})])


def indices(output):
    return [json.loads(line)["index"] for line in output.read_bytes().splitlines()]


def test_blank_lines_are_skipped_but_counted(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'{"prompt": "a"}\r\n\n  \n{"prompt": "b"}')
    assert read_input(file) == [
        InputLine(0, b'{"prompt": "a"}'),
        InputLine(3, b'{"prompt": "b"}'),
    ]


def test_requests_are_parsed():
    messages = {"messages": [{"role": "user", "content": "a", "name": "Tom"}]}
    for asked in (
        {"prompt": "a"},
        {"prompt": "", "id": "x"},
        {"prompt": "a", "id": 7},
        messages,
    ):
        assert BatchRequest.model_validate_json(
            json.dumps(asked | {"answer": "b"})
        ) == BatchRequest(**asked)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, "Invalid JSON") for text in (b"{", b"\xff", b"[" * 100_000)),
        (b'"a"', "Input should be an object"),
        (b"{}", "either 'prompt' or 'messages'"),
        (
            b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}',
            "either 'prompt' or 'messages'",
        ),
        (b'{"prompt": 1}', "prompt: Input should be a valid string"),
        (b'{"prompt": "a", "id": [1]}', "id: Input should be a valid"),
        (b'{"messages": []}', "messages: List should have at least 1 item"),
        (b'{"messages": ["a"]}', "messages: Input should be"),
        (b'{"messages": [{"content": "a"}]}', "messages: Field required"),
        (
            b'{"messages": [{"role": "user", "content": 1}]}',
            "messages: Input should be a valid string",
        ),
    ],
)
def test_bad_lines_say_what_is_wrong(text, problem):
    with pytest.raises(ValueError) as raised:
        BatchRequest.model_validate_json(text)
    assert problem in one_line(raised.value)


def test_a_run_cut_at_any_byte_goes_on_to_one_record_per_line(output):
    write(output, LINES)
    complete = output.read_bytes()
    for length in range(len(complete) + 1):
        output.write_bytes(complete[:length])
        write(output, LINES)
        assert output.read_bytes() == complete


def test_records_in_any_order_count_and_lines_added_to_the_input_are_done_later(output):
    with ResultFile(output, LINES, SETTINGS) as results:
        results.append([(LINES[2], {"text": ""}), (LINES[0], {"error": "too long"})])
    with ResultFile(output, LINES, SETTINGS) as results:
        assert results.pending == [LINES[1]]
        assert (results.num_resumed, results.num_errors) == (2, 1)
    write(output, [*LINES, InputLine(4, b'{"prompt": "Say 4"}')])
    assert indices(output) == [3, 0, 1, 4]


@pytest.mark.parametrize(
    ("lines", "settings", "problem"),
    [
        (
            [InputLine(0, b'{"prompt": "Shout 0"}'), *LINES[1:]],
            SETTINGS,
            "line 1 was made from another input",
        ),
        (LINES[1:], SETTINGS, "line 1 was made from another input"),
        (LINES, settings_digest({"model": "other"}), "another model or other settings"),
    ],
)
def test_an_output_of_something_else_is_refused_and_kept(
    output, lines, settings, problem
):
    write(output, LINES)
    before = output.read_bytes()
    with pytest.raises(ValueError, match=problem):
        ResultFile(output, lines, settings)
    assert output.read_bytes() == before
    output.write_bytes(before * 2)
    with pytest.raises(ValueError, match="second record of input line 0"):
        ResultFile(output, LINES, SETTINGS)


@pytest.mark.parametrize(
    "content",
    [b"my notes", b'{"a": 1}\n', b'{"index": "x", "input_hash": 1}\n', b"\n", b"7\n"],
)
def test_a_file_that_is_no_output_is_refused_and_kept(output, content):
    output.write_bytes(content)
    with pytest.raises(ValueError, match="not a record"):
        ResultFile(output, LINES, SETTINGS)
    assert output.read_bytes() == content


def test_two_runs_cannot_write_one_file(output):
    with (
        ResultFile(output, LINES, SETTINGS),
        pytest.raises(ValueError, match="another run is writing"),
    ):
        ResultFile(output, LINES, SETTINGS)
    write(output, LINES)
    assert indices(output) == [0, 1, 3]


def test_an_engine_that_outlives_its_run_does_not_keep_the_output(output):
    fork = multiprocessing.get_context("fork")
    runs = fork.Event()

    def run() -> None:
        runs.set()
        signal.pause()

    with ResultFile(output, LINES, SETTINGS):
        engine = fork.Process(target=run, daemon=True)
        engine.start()
        assert runs.wait(60)
    try:
        write(output, LINES)
    finally:
        engine.kill()
        engine.join()
    assert indices(output) == [0, 1, 3]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_disk_that_fills_up_midway_leaves_whole_records_and_a_torn_one(
    output, at_once
):
    """A limit on the size of files cuts a write short like a full disk."""
    write(output, LINES)
    complete = output.read_bytes()
    output.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ResultFile(output, LINES, SETTINGS) as results:
        records = [(line, {"text": f"said {line.index}"}) for line in LINES]
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(complete) - 5, limits[1]))
        try:
            *whole, last = [records] if at_once else [[record] for record in records]
            for batch in whole:
                results.append(batch)
            with pytest.raises(ValueError, match=r"File too large; the same command"):
                results.append(last)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert output.read_bytes() == complete[:-5]
    with ResultFile(output, LINES, SETTINGS) as results:
        assert results.pending == LINES[2:]
    write(output, LINES)
    assert output.read_bytes() == complete


def test_any_text_survives_the_file(output):
    text = 'line\nbreak\u2028 "quoted" é 数 \ud800'
    write(output, LINES[:1], text=text)
    (line,) = output.read_bytes().splitlines()
    assert json.loads(line)["text"] == text
