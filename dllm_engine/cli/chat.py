"""``dllm chat``: a conversation in the terminal that shows how the masks are filled."""

import argparse
import io
import itertools
import re
import shutil
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from dllm_engine.cli.engine import add_decoding_arguments, add_engine_arguments, add_structure_arguments, start_engine
from dllm_engine.demo import DEMO_MODELS
from dllm_engine.text import choices, is_text, one_line

if TYPE_CHECKING:
    from dllm_engine.front_end import FrontEnd
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams

COMMANDS = {
    "/help": "lists the commands",
    "/clear": "forgets the conversation",
    "/exit": "ends, as Ctrl-D does",
}
GREETING = "/help lists the commands, Ctrl-D ends, Ctrl-C stops an answer."
HELP = "\n".join(f"{name:7} {does}" for name, does in COMMANDS.items())
HELP += "\nA message that begins with such a word needs a space before it."
_COMMAND = re.compile(r"/\w*(\s|$)")
DEMO_HINT = "The demo model knows single tasks only, such as “Reverse: Rome Tom Oslo”: give /clear before the next one."
PROMPT = "> "


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal and watch it denoise",
        description=f"Talk to a model: each line is a message, and its answer fills in step by step. {GREETING}",
    )
    add_decoding_arguments(parser)
    add_structure_arguments(parser)
    add_engine_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    def check(front_end: "FrontEnd", params: "DiffusionParams") -> None:
        if not front_end.has_chat_template:
            raise ValueError(f"model {args.model!r} has no chat template; give it single prompts with `dllm generate`")
        front_end.check_params(params)

    llm, params = start_engine(args, check)
    screen = Screen(sys.stdout) if sys.stdout.isatty() else None
    conversation = Conversation(llm, params, screen)
    if screen is not None:
        with suppress(ImportError):
            import readline  # noqa: F401  input() edits lines and remembers them once it is loaded
        print(GREETING)
        if args.model in DEMO_MODELS:
            print(DEMO_HINT)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `is_text` finds bytes that are not UTF-8
    while True:
        try:
            line = input(PROMPT if screen is not None else "")
        except (EOFError, KeyboardInterrupt) as end:
            if screen is not None:
                print()
            if isinstance(end, KeyboardInterrupt):
                raise
            return 0
        said = line.strip()
        if said == "/exit":
            return 0
        if said == "/help":
            print(HELP)
        elif said == "/clear":
            conversation.messages.clear()
        elif _COMMAND.match(line):
            print(f"dllm: error: {said} is unknown{choices(said, COMMANDS)}", file=sys.stderr)
        elif not is_text(said):
            print("dllm: error: the message is not UTF-8; send it in that encoding", file=sys.stderr)
        elif said:
            conversation.answer(said)


class Conversation:
    """The messages so far, and the engine that answers."""

    def __init__(self, llm: "LLM", params: "DiffusionParams", screen: "Screen | None") -> None:
        """Without a ``screen``, answers are printed when they are complete."""
        from vllm.sampling_params import RequestOutputKind

        self.messages: list[dict[str, str]] = []
        self._llm, self._screen = llm, screen
        self._params = params.clone()
        self._params.output_kind = RequestOutputKind.CUMULATIVE
        if screen is not None:
            self._params.extra_args = (params.extra_args or {}) | {"stream_granularity": "step"}
        self._ids = (f"chat-{number}" for number in itertools.count())

    def answer(self, said: str) -> None:
        """Print the answer to a message. Both are kept unless the answer fails or is stopped."""
        from vllm.exceptions import VLLMClientError

        asked = [*self.messages, {"role": "user", "content": said}]
        tokens = self._llm.get_tokenizer().apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        request_id = next(self._ids)
        try:
            self._llm.llm_engine.add_request(request_id, {"prompt_token_ids": tokens}, self._params)
        except (ValueError, VLLMClientError) as error:
            hint = "; /clear forgets the conversation so far" if self.messages else ""
            print(f"dllm: error: {one_line(error)}{hint}", file=sys.stderr)
            return
        completion = self._wait(request_id)
        if completion is None:
            self._show_end("(stopped)")
        elif completion.finish_reason in ("stop", "length"):
            self._show_end(completion.text)
            self.messages = [*asked, {"role": "assistant", "content": completion.text}]
        else:
            self._show_end("")
            print(f"dllm: error: the engine ended the request: {completion.finish_reason}", file=sys.stderr)

    def _wait(self, request_id: str) -> Any:
        """Step the engine until the answer is complete; returns the completion, or None after Ctrl-C."""
        engine = self._llm.llm_engine
        with _noting_interrupts() as interrupted:
            while True:
                for output in engine.step():
                    if output.finished:
                        return output.outputs[0]
                    if self._screen is not None:
                        sent, block = output.outputs[0].text, output.outputs[0].provisional
                        # Behind it the running blocks, with their masks.
                        self._screen.draw(sent if block is None else sent + block.unsent_text)
                if interrupted():
                    engine.abort_request([request_id])
                    return None

    def _show_end(self, text: str) -> None:
        if self._screen is None:
            print(text.strip(), flush=True)
        else:
            self._screen.finish(text)


@contextmanager
def _noting_interrupts() -> Iterator[Callable[[], bool]]:
    """Note Ctrl-C instead of interrupting a step of the engine; a second Ctrl-C raises ``KeyboardInterrupt``."""
    noted = False

    def note(*_: Any) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)


class Screen:
    """The part of a terminal where a running answer is redrawn."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._num_rows = 0

    def draw(self, text: str) -> None:
        """Replace what was drawn. Of a text that is taller than the terminal, the end is shown."""
        columns, lines = shutil.get_terminal_size()
        rows = rows_of(_printable(text), columns - 1)[-max(lines - 1, 1) :]
        self._write("\n".join(rows))
        self._num_rows = len(rows)

    def finish(self, text: str) -> None:
        """Replace what was drawn by the whole text, which stays."""
        self._write(_printable(text) + "\n")
        self._num_rows = 0

    def _write(self, text: str) -> None:
        up = f"\x1b[{self._num_rows - 1}A" if self._num_rows > 1 else ""
        self._terminal.write(f"{up}\r\x1b[J{text}")
        self._terminal.flush()


def rows_of(text: str, columns: int) -> list[str]:
    """The text broken into rows of at most ``columns`` terminal cells."""
    rows = []
    for line in text.split("\n"):
        row, used = "", 0
        for character in line:
            cells = _cells(character)
            if used + cells > columns and row:
                rows.append(row)
                row, used = "", 0
            row, used = row + character, used + cells
        rows.append(row)
    return rows


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def _printable(text: str) -> str:
    """The text without surrounding whitespace and without control characters."""
    return "".join(
        character if character == "\n" or unicodedata.category(character) != "Cc" else " " for character in text.strip()
    )
