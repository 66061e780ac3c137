"""Talk to a model in the terminal and watch it denoise.

Each line is a message, and its answer fills in step by step. /help lists the commands,
Ctrl-D ends, Ctrl-C stops an answer.
"""

import argparse
import io
import re
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dllm_engine.batch import Message, outcome, prompt_tokens
from dllm_engine.cli.engine import add_request_arguments, start_engine
from dllm_engine.demo import DEMO_MODELS
from dllm_engine.text import choices, is_text, one_line

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams

COMMANDS = ("/help", "/clear", "/exit")
HELP = (
    "/help lists the commands, /clear forgets the conversation, /exit and Ctrl-D end, "
    "Ctrl-C stops an answer."
)
DEMO_HINT = (
    "The demo model knows single tasks only, such as “Reverse: Rome Tom Oslo”: give "
    "/clear before the next one."
)
PROMPT = "> "
ALTERNATE_SCREEN, MAIN_SCREEN, CLEAR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H\x1b[J"
"""An answer is drawn on the alternate screen, where text may wrap and scroll, and is
then printed on the main screen.
"""


add_arguments = add_request_arguments


def run(args: argparse.Namespace) -> int:
    llm, params = start_engine(args)
    if not llm.has_chat_template:
        raise ValueError(
            f"model {args.model!r} has no chat template; give it single prompts with "
            f"`dllm generate`"
        )
    from vllm.sampling_params import RequestOutputKind

    on_terminal = sys.stdout.isatty()
    params.output_kind = RequestOutputKind.CUMULATIVE
    params.stream_granularity = "step" if on_terminal else None
    if on_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - history of input()
        print(HELP)
        if args.model in DEMO_MODELS:
            print(DEMO_HINT)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # `is_text` detects invalid UTF-8.
        sys.stdin.reconfigure(errors="surrogateescape")
    messages: list[Message] = []
    while True:
        try:
            line = input(PROMPT if on_terminal else "")
        except EOFError:
            print(end="\n" if on_terminal else "")
            return 0
        message = line.strip()
        if message == "/exit":
            return 0
        if message == "/help":
            print(HELP)
        elif message == "/clear":
            messages.clear()
        elif re.match(r"/\w*(\s|$)", line):
            hint = "; a message that begins with such a word needs a space before it"
            print(
                f"dllm: error: {message} is unknown{choices(message, COMMANDS)}{hint}",
                file=sys.stderr,
            )
        elif not is_text(message):
            print(
                "dllm: error: the message is not UTF-8; send it in that encoding",
                file=sys.stderr,
            )
        elif message:
            answer(message, messages, llm, params, on_terminal=on_terminal)


def answer(
    text: str,
    messages: list[Message],
    llm: "LLM",
    params: "DiffusionParams",
    *,
    on_terminal: bool,
) -> None:
    """Print the answer to a message; on a terminal while it is denoised. Message and
    answer are appended to ``messages``, unless the answer fails or is stopped."""
    from vllm.exceptions import VLLMClientError

    from dllm_engine.lengths.requests import with_lengths

    conversation = [*messages, Message(role="user", content=text)]
    tokens = prompt_tokens(conversation, llm.get_tokenizer())
    prompt = {"prompt_token_ids": tokens}
    try:
        (settled,) = with_lengths(llm, [prompt], [params])
        request_id = llm.llm_engine.add_request("chat", prompt, settled)
    except (ValueError, VLLMClientError) as error:
        hint = "; /clear forgets the conversation so far" if messages else ""
        print(f"dllm: error: {one_line(error)}{hint}", file=sys.stderr)
        return
    completion = _completion(llm, request_id, text if on_terminal else None)
    if completion is None:
        print("(stopped)")
    elif "error" in (ended := outcome(completion)):
        print(f"dllm: error: {ended['error']}", file=sys.stderr)
    else:
        print(
            _printable(completion.text) if on_terminal else completion.text.strip(),
            flush=True,
        )
        messages[:] = [
            *conversation,
            Message(role="assistant", content=completion.text),
        ]


def _completion(llm: "LLM", request_id: str, drawn_after: str | None) -> Any:
    """Step the engine until the answer is complete, and draw it below the message
    unless this is None. Returns the completion, or None after Ctrl-C, which does not
    interrupt a step."""
    on_screen, off_screen = (
        ("", "") if drawn_after is None else (ALTERNATE_SCREEN, MAIN_SCREEN)
    )
    interrupts: list[int] = []
    before = signal.signal(
        signal.SIGINT, lambda number, frame: interrupts.append(number)
    )
    try:
        print(end=on_screen)
        while not interrupts:
            for output in llm.llm_engine.step():
                completion = output.outputs[0]
                if output.finished:
                    return completion
                if drawn_after is not None:
                    # The final text, then the running blocks with their masks.
                    running = (
                        completion.provisional.unsent_text
                        if completion.provisional is not None
                        else ""
                    )
                    print(
                        f"{CLEAR}{PROMPT}{drawn_after}\n{_printable(completion.text + running)}",
                        end="",
                        flush=True,
                    )
        llm.llm_engine.abort_request([request_id], internal=True)
        return None
    finally:
        signal.signal(signal.SIGINT, before)
        print(end=off_screen, flush=True)


def _printable(text: str) -> str:
    """The text without surrounding whitespace and control characters."""
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", " ", text.strip())
