"""Answer a prompt, or every line of a file.

A run over a file, with --input and --output, may be interrupted at any time; the same
command goes on where it stopped.
"""

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from dllm_engine.batch import (
    Message,
    ResultFile,
    answer_lines,
    outcome,
    read_input,
    settings_digest,
)
from dllm_engine.cli.arguments import add_value
from dllm_engine.cli.engine import (
    DECODING,
    STRUCTURE,
    add_request_arguments,
    start_engine,
)
from dllm_engine.text import is_text

_SETTINGS = (
    "model",
    "dtype",
    "raw",
    "cache_method",
    "cache_option",
    "engine_arg",
    "guide_model",
    "guide_tokens_per_token",
)
"""Arguments beside those about decoding that change responses. A run resumes only an
output with equal values.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="a text, in quotes")
    lines = 'JSON lines {"prompt": "…"} or {"messages": […]}, optionally with "id"'
    add_value(parser, "--input", Path, "FILE", lines)
    add_value(parser, "--output", Path, "FILE", "JSON lines, in the order of finishing")
    parser.add_argument(
        "--raw",
        action="store_true",
        help="give prompts to the model as they are, no chat template",
    )
    place = parser.add_mutually_exclusive_group()
    add_value(
        place,
        "--suffix",
        str,
        "TEXT",
        "write what belongs between PROMPT, taken as it is, and this text, or "
        "--gen-length tokens",
    )
    template = (
        "the answer, with a hole of N tokens where it says [[N]], and of as many as "
        'belong there where it says [[]]: "Ida=[[2]], Tom=48"'
    )
    add_value(place, "--template", str, "TEXT", template)
    parser.add_argument(
        "--figures",
        action="store_true",
        help="print on stderr what the answer to PROMPT cost",
    )
    add_request_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if (args.prompt is None) == (args.input is None):
        raise ValueError("give either a PROMPT or --input FILE")
    if (args.input is None) != (args.output is None):
        raise ValueError("--input and --output go together; give both, or a PROMPT")
    if args.input is None:
        return _answer_prompt(args)
    if args.suffix is not None or args.template is not None:
        raise ValueError("--suffix and --template go with a PROMPT, not with --input")
    return _answer_file(args)


def _answer_prompt(args: argparse.Namespace) -> int:
    if not all(map(is_text, filter(None, (args.prompt, args.suffix, args.template)))):
        raise ValueError(
            "PROMPT, --suffix and --template must be UTF-8; give the text in that "
            "encoding"
        )
    llm, params = start_engine(args)
    use_chat = not args.raw and llm.has_chat_template
    prompt = [Message(role="user", content=args.prompt)] if use_chat else args.prompt
    if args.suffix is not None:
        (output,) = llm.infill(args.prompt, args.suffix, params)
    elif args.template is not None:
        from dllm_engine.infill.template import parse_template  # imports vLLM

        (output,) = llm.fill_in([prompt], [parse_template(args.template)], params)
    else:
        (output,) = (llm.chat if use_chat else llm.generate)(
            prompt, params, use_tqdm=False
        )
    completion = output.outputs[0]
    if "error" in (ended := outcome(completion)):
        raise ValueError(ended["error"])
    print((completion.text if args.template is None else completion.joined).strip())
    if args.figures:
        figures = {
            "prompt_tokens": len(output.prompt_token_ids),
            "response_tokens": len(completion.token_ids),
        }
        if completion.token_ids:
            figures |= completion.diffusion.to_json()
        for name, value in figures.items():
            print(f"{name}: {value}", file=sys.stderr)
    return 0


def _answer_file(args: argparse.Namespace) -> int:
    lines = read_input(args.input)
    settings = settings_digest(
        {name: getattr(args, name) for name in (*_SETTINGS, *DECODING, *STRUCTURE)}
    )
    with ResultFile(args.output, lines, settings) as results:
        if results.pending:
            llm, params = start_engine(args)
            with tqdm(
                total=len(lines), initial=results.num_resumed, desc="Requests", unit=""
            ) as bar:
                use_chat = not args.raw and llm.has_chat_template
                for answers in answer_lines(
                    llm, results.pending, params, use_chat=use_chat
                ):
                    results.append(answers)
                    bar.update(len(answers))
        done = (
            f"{len(lines)} requests done, {results.num_resumed} of them by an earlier "
            f"run"
        )
        print(f"{args.output}: {done}; errors: {results.num_errors}", file=sys.stderr)
        return 1 if results.num_errors else 0
