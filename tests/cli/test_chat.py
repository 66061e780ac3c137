"""``dllm chat`` with an engine that the tests share, and a terminal made of strings."""

import io
import os
import signal

import pytest

from dllm_engine.cli import chat, engine
from dllm_engine.cli.chat import (
    ALTERNATE_SCREEN,
    CLEAR,
    COMMANDS,
    DEMO_HINT,
    HELP,
    MAIN_SCREEN,
    PROMPT,
)
from dllm_engine.cli.main import main
from tests.support.engines import assert_nothing_left

HELLO = "Hello! How can I help?"
OPENING = f"{HELP}\n{DEMO_HINT}\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def drawings(self) -> list[list[str]]:
        """For each answer, the pictures on the alternate screen."""
        _, *parts = self.getvalue().split(ALTERNATE_SCREEN)
        return [part.split(MAIN_SCREEN)[0].split(CLEAR)[1:] for part in parts]

    @property
    def main_screen(self) -> str:
        first, *parts = self.getvalue().split(ALTERNATE_SCREEN)
        return first + "".join(part.split(MAIN_SCREEN)[1] for part in parts)


@pytest.fixture
def run(demo, monkeypatch):
    """``run(text, terminal=None, llm=demo, arguments=())``: the command, with the text
    typed into it.
    """

    def run(text, terminal=None, llm=demo, arguments=()):
        monkeypatch.setattr(engine, "load", lambda _: llm)
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        if terminal is not None:
            monkeypatch.setattr("sys.stdout", terminal)
        return main(["chat", *arguments])

    yield run
    assert_nothing_left(demo)


def test_without_a_terminal_answers_are_plain_lines_up_to_the_exit(run, capsys):
    assert run("Hello!\n\nReverse: Rome Tom Oslo\n/exit\nHello!\n") == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{HELLO}\nOslo Tom Rome\n", "")


def test_on_a_terminal_the_masks_fill_in_and_the_answer_stays(run):
    terminal = Terminal()
    assert run("Hello!\n", terminal) == 0
    assert terminal.main_screen == f"{OPENING}{PROMPT}{HELLO}\n{PROMPT}\n"
    (pictures,) = terminal.drawings
    assert all(picture.startswith(f"{PROMPT}Hello!\n") for picture in pictures)
    counts = [picture.count("░") for picture in pictures]
    assert counts[0] == 7, "after the first step of a block of 8"
    assert counts == sorted(counts, reverse=True)


def test_earlier_turns_are_sent_along_until_they_are_cleared(run, demo, monkeypatch):
    asked = []
    tokenizer = demo.get_tokenizer()
    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(
        type(tokenizer),
        "apply_chat_template",
        lambda self, messages, **kwargs: (
            asked.append([m["content"] for m in messages]) or apply(messages, **kwargs)
        ),
    )
    run("Hello!\nHi!\n/clear\nHello!\n")
    assert asked == [["Hello!"], ["Hello!", " " + HELLO, "Hi!"], ["Hello!"]]


def test_ctrl_c_stops_the_answer_and_the_next_one_is_given(run):
    before = signal.getsignal(
        signal.SIGINT
    )  # ignored where the tests run in the background

    class Interrupting(Terminal):
        def write(self, text: str) -> int:
            if "░" in text and "░" not in self.getvalue():
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    terminal = Interrupting()
    assert run("Hello!\nHello!\n", terminal) == 0
    assert (
        terminal.main_screen
        == f"{OPENING}{PROMPT}(stopped)\n{PROMPT}{HELLO}\n{PROMPT}\n"
    )
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_at_the_prompt_ends_the_command(run, monkeypatch, capsys):
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


def test_a_model_without_a_chat_template_is_refused(run, demo, monkeypatch, capsys):
    monkeypatch.setattr(type(demo), "has_chat_template", False)
    assert run("Hello!\n") == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["/ext", "/", "/clear now", "/save conversation.txt"])
def test_a_command_that_is_unknown_is_no_message(run, capsys, line):
    assert run(f"{line}\n/help\n") == 0
    printed = capsys.readouterr()
    assert printed.out == f"{HELP}\n"
    assert printed.err.startswith(f"dllm: error: {line} is unknown; ")
    assert f"hoose one of {', '.join(COMMANDS)}" in printed.err


@pytest.mark.parametrize("message", [" /exit Hello!", "/etc/hosts: Hello!"])
def test_a_message_may_begin_with_a_slash(run, monkeypatch, message):
    asked = []
    monkeypatch.setattr(chat, "answer", lambda said, *_, **__: asked.append(said))
    assert run(f"{message}\n") == 0
    assert asked == [message.strip()]


@pytest.mark.parametrize("line", [b"\xff\xfe", b"caf\xe9", b"\xed\xa0\x80"])
def test_bytes_that_are_no_text_are_named_and_the_next_message_is_answered(
    run, monkeypatch, capsys, line
):
    run("")
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(line + b"\nHello!\n"), "utf-8")
    )
    assert main(["chat"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{HELLO}\n"
    assert (
        printed.err
        == "dllm: error: the message is not UTF-8; send it in that encoding\n"
    )


def test_what_a_terminal_takes_for_commands_is_not_passed_on():
    assert chat._printable(" red\x1b[31m\x07 \x9b2J\ntext\n") == "red [31m   2J\ntext"
