"""Entry point of ``dllm``: the subcommands, and errors as one line."""

import argparse
import os
import sys
from collections.abc import Sequence

from dllm_engine.cli import (
    bench,
    chat,
    check,
    evaluate,
    generate,
    models,
    plan,
    serve,
    tune,
)
from dllm_engine.cli.arguments import CommandParser
from dllm_engine.text import one_line
from dllm_engine.version import __version__

TRACEBACK_VARIABLE = "DLLM_TRACEBACK"
ERROR, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 (done, but some inputs failed), 2 (error) or 130 (Ctrl-C)."""
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    args, unknown = parser.parse_known_args(argv)
    args.argv, args.unknown = argv, unknown
    try:
        status: int = args.run(args)
        return status
    except KeyboardInterrupt:
        print("dllm: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if args.traceback or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            raise
        print(f"dllm: error: {one_line(error)}", file=sys.stderr)
        return ERROR


def build_parser() -> argparse.ArgumentParser:
    """The command line. ``args.run`` is the chosen command's function."""
    parser = CommandParser(
        prog="dllm",
        description="Diffusion language models (LLaDA, Dream, SDAR) inside vLLM.",
        epilog='To try it with the demo model: dllm generate "Reverse: Rome Tom Oslo"',
    )
    parser.add_argument("--version", action="version", version=f"dllm-engine {__version__}")
    parser.add_argument(
        "--traceback",
        action="store_true",
        help=f"show where an error came from; the same as {TRACEBACK_VARIABLE}=1 in the environment",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    running = (generate, chat, serve, evaluate, tune, bench)
    for command in (*running, check, plan, models):
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
