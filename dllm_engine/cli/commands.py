"""The command line of ``dllm``: its subcommands."""

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from dllm_engine import __version__
from dllm_engine.cache_methods import CACHE_METHODS
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
_ZSH_HEAD = """(( $+functions[compdef] )) || { autoload -U compinit && compinit }
autoload -U +X bashcompinit && bashcompinit
"""
_SUGGESTED: dict[str, Iterable[str]] = {
    "model": DEMO_MODELS,
    "cache_method": CACHE_METHODS,
}
"""Suggested values of options that also accept other values."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line. ``args.run`` is the function of the chosen
    command.
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
        # All options come after the command.
        command.usage = command.usage or " ".join((command.prog, "[options]", *named))
    path = commands.add_parser("demo-path", help="print the folder of a demo model")
    path.add_argument("model", nargs="?", choices=DEMO_MODELS, default=DEMO_MODEL)
    path.set_defaults(run=_print_demo_path)
    shell = commands.add_parser(
        "completion", help="print a script that completes commands in a shell"
    )
    shell.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell.set_defaults(run=_print_completion)
    return parser


def _print_demo_path(args: argparse.Namespace) -> int:
    print(model_path(args.model))
    return 0


def _print_completion(args: argparse.Namespace) -> int:
    (commands,) = (
        action.choices
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    write = _fish_script if args.shell == "fish" else _bash_script
    print(_ZSH_HEAD * (args.shell == "zsh") + write(commands))
    return 0


def _values(action: argparse.Action) -> list[str]:
    return [str(value) for value in action.choices or _SUGGESTED.get(action.dest, ())]


def _bash_script(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Completion script for bash, and for zsh with its emulation of bash's functions."""
    cases = []
    for name, parser in commands.items():
        options = [word for word in parser._option_string_actions if len(word) > 2]
        for action in parser._actions:
            words = _values(action)
            if words and action.option_strings:
                flag = action.option_strings[-1]
                cases.append(f'{name}:{flag}) words="{" ".join(words)}" ;;')
            else:
                options += words
        cases.append(f'{name}:*) words="{" ".join(options)}" ;;')
    lines = "\n        ".join(cases)
    return f"""_dllm() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{" ".join(commands)}"
    else
        case "${{COMP_WORDS[1]}}:$before" in
        {lines}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _dllm dllm"""


def _fish_script(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    lines = [f"complete -c dllm -n __fish_use_subcommand -fa '{' '.join(commands)}'"]
    for name, parser in commands.items():
        begin = f"complete -c dllm -n '__fish_seen_subcommand_from {name}'"
        for action in parser._actions:
            words = " ".join(_values(action))
            flags = [word for word in action.option_strings if word.startswith("--")]
            values = f" -xa '{words}'" if words else ""
            if not action.option_strings and words:
                lines.append(f"{begin} -fa '{words}'")
            lines += [f"{begin} -l {flag[2:]}{values}" for flag in flags]
    return "\n".join(lines)
