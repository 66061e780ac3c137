"""Entry point of ``dllm``: the subcommands, and errors as one line."""

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Sequence
from typing import Any

from dllm_engine import __version__
from dllm_engine.cli import (
    bench,
    chat,
    check,
    evaluate,
    generate,
    lm_eval,
    models,
    plan,
    serve,
    tune,
)
from dllm_engine.cli.arguments import CommandParser
from dllm_engine.demo import DEMO_MODEL, DEMO_MODELS, model_path
from dllm_engine.text import one_line

TRACEBACK_VARIABLE = "DLLM_TRACEBACK"
COMMANDS = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "eval": evaluate,
    "lm-eval": lm_eval,
    "tune": tune,
}
COMMANDS |= {"bench": bench, "check": check, "plan": plan, "models": models}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 (done, but some inputs failed),
    2 (error) or 130 (Ctrl-C).
    """
    atexit.register(
        gc.freeze
    )  # Python would look through all that vLLM imports once more, for seconds
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    args, unknown = parser.parse_known_args(argv)
    args.argv, args.unknown = argv, unknown
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("dllm: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if args.traceback or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            raise
        print(f"dllm: error: {one_line(error)}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """The command line. ``args.run`` is the function of the chosen command: ``run`` of
    its module, but for one.
    """
    parser = CommandParser(
        prog="dllm",
        description="Diffusion language models (LLaDA, Dream, SDAR) inside vLLM.",
        epilog='To try it with the demo model: dllm generate "Reverse: Rome Tom Oslo"',
    )
    parser.add_argument(
        "--version", action="version", version=f"dllm-engine {__version__}"
    )
    traceback = (
        f"show where an error came from; the same as {TRACEBACK_VARIABLE}=1 in the "
        f"environment"
    )
    parser.add_argument("--traceback", action="store_true", help=traceback)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        description = (module.__doc__ or "").replace("``", "`")
        first = " ".join(description.partition("\n\n")[0].split()).rstrip(".")
        about: Any = {"help": first[0].lower() + first[1:], "description": description}
        command = commands.add_parser(name, conflict_handler="resolve", **about)
        command.set_defaults(run=module.run)
        module.add_arguments(command)
        words = [action for action in command._actions if not action.option_strings]
        named = [
            command._get_formatter()._format_args(word, str(word.metavar))
            for word in words
        ]
        command.usage = command.usage or " ".join(
            (command.prog, "[options]", *named)
        )  # all options follow
    path = commands.add_parser("demo-path", help="print the folder of a demo model")
    path.add_argument("model", nargs="?", choices=DEMO_MODELS, default=DEMO_MODEL)
    path.set_defaults(run=_print_demo_path)
    return parser


def _print_demo_path(args: argparse.Namespace) -> int:
    print(model_path(args.model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
