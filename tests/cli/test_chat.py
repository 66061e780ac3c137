"""``dllm chat`` around an engine that the tests share, with a terminal of our own."""

import io
import os
import re
import signal

import pytest

from dllm_engine.cli import chat, engine
from dllm_engine.cli.chat import COMMANDS, DEMO_HINT, GREETING, PROMPT, Screen, rows_of
from dllm_engine.cli.main import main
from dllm_engine.demo import DEMO_BLOCKS
from dllm_engine.front_end import FrontEnd
from tests.support.engines import assert_nothing_left

HELLO = "Hello! How can I help?"
OPENING = f"{GREETING}\n{DEMO_HINT}\n"


class Terminal(io.StringIO):
    """A terminal of endless height that shows what was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures: list[str] = []
        self.on_write = lambda text: None

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        self.pictures.append(self.picture())
        self.on_write(text)
        return written

    def picture(self) -> str:
        rows, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[\d*[A-Z]|[^\x1b]", self.getvalue()):
            if part == "\x1b[J":
                rows[row:] = [rows[row][:column]]
            elif part.startswith("\x1b"):
                assert part.endswith("A"), part
                row -= int(part[2:-1])
            elif part == "\r":
                column = 0
            elif part == "\n":
                row, column = row + 1, 0
                rows += [""] * (row == len(rows))
            else:
                rows[row], column = rows[row][:column] + part, column + 1
        return "\n".join(rows)


class Keyboard(io.StringIO):
    """What is typed, which a terminal shows."""

    def __init__(self, text: str, terminal: Terminal | None) -> None:
        super().__init__(text)
        self.terminal = terminal

    def readline(self, size: int = -1) -> str:
        line = super().readline(size)
        if self.terminal is not None:
            self.terminal.write(line)
        return line


@pytest.fixture
def run(demo, monkeypatch):
    """``run(text, terminal=None, llm=demo, arguments=())``: the command, with the text typed into it."""

    def run(text, terminal=None, llm=demo, arguments=()):
        monkeypatch.setattr(engine, "load", lambda _: llm)
        monkeypatch.setattr("sys.stdin", Keyboard(text, terminal))
        if terminal is not None:
            monkeypatch.setattr("sys.stdout", terminal)
        return main(["chat", *arguments])

    yield run
    assert_nothing_left(demo)


def test_without_a_terminal_answers_are_plain_lines_up_to_the_exit(run, capsys):
    assert run("Hello!\n\nReverse: Rome Tom Oslo\n/exit\nHello!\n") == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{HELLO}\nOslo Tom Rome\n", "")


def test_on_a_terminal_the_masks_fill_in(run):
    terminal = Terminal()
    assert run("Hello!\n", terminal) == 0
    *_, last = terminal.pictures
    assert last == f"{OPENING}{PROMPT}Hello!\n{HELLO}\n{PROMPT}\n"
    counts = [picture.count("░") for picture in terminal.pictures]
    falling = counts[counts.index(7) :]  # after the first step of a block of 8
    assert falling == sorted(falling, reverse=True)
    assert (max(counts), counts[-1]) == (7, 0)


def test_a_block_diffusion_model_fills_in_a_block_at_a_time(run, engines):
    """The first one has the last tokens of the prompt, which is fed in parts."""
    terminal = Terminal()
    llm = engines(DEMO_BLOCKS, skip_tokenizer_init=False, max_num_seqs=2, max_num_batched_tokens=16)
    told = "Tom lives in Paris. Ida lives in Oslo. "
    assert (
        run(
            f"{told * 3}Where does Ida live?\n/clear\nReverse: Rome Tom Oslo\n", terminal, llm, ["--model", DEMO_BLOCKS]
        )
        == 0
    )
    for answer in ("Ida lives in Oslo.", "Oslo Tom Rome"):
        assert f"\n{answer}\n{PROMPT}" in terminal.pictures[-1]
    assert max(picture.count("░") for picture in terminal.pictures) == 7, "after the first step of a block of 8"
    assert_nothing_left(llm)


def test_earlier_turns_are_sent_along_until_they_are_cleared(run, demo, monkeypatch):
    asked = []
    tokenizer = demo.get_tokenizer()
    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(
        type(tokenizer), "apply_chat_template",
        lambda self, messages, **kwargs: asked.append([m["content"] for m in messages]) or apply(messages, **kwargs),
    )  # fmt: skip
    run("Hello!\nHi!\n/clear\nHello!\n")
    assert asked == [["Hello!"], ["Hello!", " " + HELLO, "Hi!"], ["Hello!"]]


def test_ctrl_c_stops_the_answer_and_the_next_one_is_given(run):
    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background
    terminal = Terminal()

    def interrupt(text):
        if "░" in text:
            terminal.on_write = lambda text: None
            os.kill(os.getpid(), signal.SIGINT)

    terminal.on_write = interrupt
    assert run("Hello!\nHello!\n", terminal) == 0
    assert terminal.pictures[-1] == (f"{OPENING}{PROMPT}Hello!\n(stopped)\n{PROMPT}Hello!\n{HELLO}\n{PROMPT}\n")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_the_command(run, monkeypatch, capsys):
    def interrupt(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert run("") == 130
    assert capsys.readouterr().err == "dllm: interrupted\n"


def test_a_conversation_that_is_too_long_can_go_on_after_clear(run, capsys):
    long = "Copy: " + "Tom " * 3000
    assert run(f"Hello!\n{long}\nHello!\n/clear\nHello!\n") == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3
    (error,) = printed.err.splitlines()
    assert error.startswith("dllm: error: ")
    assert "/clear" in error


def test_what_fails_every_request_is_refused_at_once(run, monkeypatch, capsys):
    assert run("Hello!\n", arguments=["--steps", "2"]) == 2
    assert "steps=2" in capsys.readouterr().err
    monkeypatch.setattr(FrontEnd, "has_chat_template", False)
    assert run("Hello!\n") == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["/ext", "/", "/clear now", "/save conversation.txt"])
def test_a_command_that_is_unknown_is_no_message(run, capsys, line):
    assert run(f"{line}\nHello!\n") == 0
    printed = capsys.readouterr()
    assert printed.out == f"{HELLO}\n"
    assert printed.err.startswith(f"dllm: error: {line} is unknown; ")
    assert printed.err.endswith(f"hoose one of {', '.join(COMMANDS)}\n")


def test_help_lists_every_command(run, capsys):
    assert run("/help\n") == 0
    printed = capsys.readouterr()
    assert all(f"{name} " in printed.out for name in COMMANDS)
    assert printed.err == ""


@pytest.mark.parametrize("message", [" /exit Hello!", "/etc/hosts: Hello!"])
def test_a_message_may_begin_with_a_slash(run, demo, monkeypatch, message):
    asked = []
    monkeypatch.setattr(chat.Conversation, "answer", lambda self, said: asked.append(said))
    assert run(f"{message}\n") == 0
    assert asked == [message.strip()]


@pytest.mark.parametrize("line", [b"\xff\xfe", b"caf\xe9", "Grüße".encode("latin-1"), b"\xed\xa0\x80"])
def test_bytes_that_are_no_text_are_named_and_the_next_message_is_answered(run, demo, monkeypatch, capsys, line):
    run("")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line + b"\nHello!\n"), "utf-8"))
    assert main(["chat"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{HELLO}\n"
    assert printed.err == "dllm: error: the message is not UTF-8; send it in that encoding\n"


# Drawing


def test_rows_break_where_the_terminal_does():
    assert rows_of("abcdef\ngh", 4) == ["abcd", "ef", "gh"]
    assert rows_of("日本語", 4) == ["日本", "語"]
    assert rows_of("e\u0301e\u0301e\u0301", 2) == ["e\u0301e\u0301", "e\u0301"]


def test_a_text_taller_than_the_terminal_shows_its_end_and_then_all(monkeypatch):
    monkeypatch.setenv("COLUMNS", "11")
    monkeypatch.setenv("LINES", "4")
    terminal = Terminal()
    screen = Screen(terminal)
    text = "".join(f"line {n:04} " for n in range(6)).strip()
    screen.draw("line 0000")
    screen.draw(text)
    assert terminal.picture().split("\n") == rows_of(text, 10)[-3:]
    screen.finish(text)
    assert terminal.picture() == text + "\n"


def test_what_a_terminal_takes_for_commands_is_not_passed_on():
    terminal = Terminal()
    Screen(terminal).finish("red\x1b[31m\x07 \x9b2J\ntext")
    assert not [command for command in ("\x1b[31m", "\x07", "\x9b") if command in terminal.getvalue()]
    assert terminal.picture().endswith("\ntext\n")
