"""The command line of ``dllm``: its subcommands."""

import argparse
from typing import Any

from dllm_engine import __version__
from dllm_engine.cli import (
    TRACEBACK_VARIABLE,
    bench,
    calibrate,
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

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "eval": evaluate,
    "lm-eval": lm_eval,
    "tune": tune,
    "calibrate": calibrate,
    "bench": bench,
    "check": check,
    "plan": plan,
    "models": models,
}


def build_parser() -> argparse.ArgumentParser:
    """The command line. ``args.run`` is the function of the chosen command: ``run`` of
    its module, but for one.
    """
    parser = CommandParser(
        prog="dllm",
        description="Diffusion language models inside vLLM.",
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
