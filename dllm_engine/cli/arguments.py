"""Syntax of command-line arguments. It is that of vLLM, without importing vLLM."""

import argparse
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel, ByteSize

from dllm_engine.decoding.unmasking_policies import UNMASKING_POLICIES
from dllm_engine.request_options.fields import COUNT_OPTIONS, DEFAULTABLE_OPTIONS
from dllm_engine.request_options.unmasking import PARALLEL_OPTIONS
from dllm_engine.text import assignments, choices, did_you_mean

DENOISING = tuple(name for name in DEFAULTABLE_OPTIONS if name != "retention_ratio")
"""Arguments about denoising, with the names of request options."""
RULES = (*COUNT_OPTIONS, *PARALLEL_OPTIONS)
"""Options that determine the number of tokens that a step fills."""


class CommandParser(argparse.ArgumentParser):
    """Parser that also accepts options with underscores (``--cache_method``). An error
    is one line, with the closest known name.
    """

    expand: "Callable[[CommandParser, list[str]], list[str]] | None" = None
    """Changes the words of a command line before they are parsed. May raise
    ``ValueError``.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        words = [self._with_dashes(word) for word in args or ()]
        if self.expand is not None:
            try:
                words = self.expand(self, words)
            except ValueError as error:
                self.error(str(error))
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown and not getattr(parsed, "passes_on_unknown", False):
            word = unknown[0]
            if not word.startswith("-"):
                self.error(
                    f"{word!r} is one argument too many; put quotes around a text with "
                    f"spaces"
                )
            self.error(
                f"{word} is "
                f"unknown{did_you_mean(word.partition('=')[0], self._option_string_actions)}"
            )
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(
            2, f"dllm: error: {message} (`{self.prog} --help` lists what it takes)\n"
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action,
                f"{value!r} is unknown{choices(value, map(str, action.choices))}",
            )

    def _with_dashes(self, word: str) -> str:
        """``word`` with dashes if it is an option of this parser. Options of vLLM may
        have underscores.
        """
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        return (
            dashed + equals + value if dashed in self._option_string_actions else word
        )


def stated_arguments(flags: Sequence[str]) -> dict[str, str]:
    """The values of ``flags`` by name, as text. The last value of a name counts;
    ``--a.b`` counts as ``a``.
    """
    stated = {}
    for flag, following in zip(flags, [*flags[1:], ""], strict=False):
        name, equals, value = flag.partition("=")
        if name.startswith("--"):
            stated[name[2:].partition(".")[0].replace("-", "_")] = (
                value if equals else following
            )
    return stated


def whole_number(text: str) -> int:
    """Parse ``8192``, or as in vLLM ``8k`` (8 × 1000) or ``8K`` (8 × 1024), also with
    m, g and t.
    """
    if match := re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgt]?)", text, re.IGNORECASE):
        number, suffix = Fraction(match[1]), match[2]
        number *= (1000 if suffix.islower() else 1024) ** "-kmgt".index(
            suffix.lower() or "-"
        )
        if number.denominator == 1:
            return int(number)
    raise argparse.ArgumentTypeError(
        f"{text!r} must be a whole number, such as 8192, 8k or 8K"
    )


def positive_int(text: str) -> int:
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a whole number of at least 1"
        )
    return number


def positive_ints(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


def json_value(text: str) -> Any:
    """Parse ``text`` as JSON, or as a number such as ``8k``; else return it unchanged."""
    for read in (json.loads, whole_number):
        with suppress(ValueError, argparse.ArgumentTypeError):
            return read(text)
    return text


def key_value(text: str) -> tuple[str, Any]:
    """Parse ``KEY=VALUE`` with a ``json_value``."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must have the form KEY=VALUE")
    return key, json_value(value)


_READ: dict[Any, tuple[Any, str]] = {
    int: (whole_number, "N"),
    float: (float, "R"),
    ByteSize: (str, "SIZE"),
    dict[str, Any]: (json_value, "JSON"),
}
"""Reader of an option's value, and its name in the help."""


def add_options(
    group: argparse._ActionsContainer, options: type[BaseModel], names: Iterable[str]
) -> None:
    """Add options as arguments, with their descriptions as help. The default is None."""
    for name in names:
        field = options.model_fields[name]
        kind = field.annotation
        if get_origin(kind) is not Literal:
            kind, *_ = get_args(kind) or (kind,)
        if get_origin(kind) is Annotated:  # with limits
            kind, *_ = get_args(kind)
        read, metavar = _READ.get(kind, (kind, name.split("_")[-1].upper()))
        how: dict[str, Any] = {"type": read, "metavar": metavar}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif get_origin(kind) is Literal:
            how = {"choices": get_args(kind)}
        meaning, _, without = (
            " ".join((field.description or "").split())
            .replace("``", "`")
            .partition("None: ")
        )
        default = (
            without.rstrip(".")
            if field.default is None or field.is_required()
            else str(field.default)
        )
        meaning = (meaning[0].lower() + meaning[1:].rstrip(". ")).replace("%", "%%")
        meaning = f"{meaning} (default: {default})" if default else meaning
        group.add_argument(f"--{name.replace('_', '-')}", help=meaning, **how)


def add_value(
    group: argparse._ActionsContainer,
    names: str,
    read: Any,
    metavar: str,
    help: str,
    **more: Any,
) -> None:
    """Add an option with a value. ``names`` are separated by spaces. The help ends with
    the default in ``more``.
    """
    help += " (default: %(default)s)" if more.get("default") else ""
    group.add_argument(*names.split(), type=read, metavar=metavar, help=help, **more)


def split_names(text: str) -> list[str]:
    """Split at commas before a name, not within a value
    (``es_dllm:keep_schedule=[[1,0],[0.5,0.25]]``).
    """
    return re.split(r",(?=[a-z])", text)


def parse_method(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse a cache method and its options: ``sparse``,
    ``sparse:retention_ratio=0.25+pool_kernel_size=1``. Several values,
    ``sparse:retention_ratio=0.25:0.5``, give one method for each combination."""
    method, _, options_text = text.partition(":")
    chosen = []
    for option in filter(None, options_text.split("+")):
        name, equals, values = option.partition("=")
        if not name or not equals:
            raise ValueError(
                f"method {text!r}: write its options as {method}:NAME=VALUE+NAME=VALUE"
            )
        chosen.append([(name, json_value(value)) for value in values.split(":")])
    return [(method, dict(options)) for options in itertools.product(*chosen)]


def parse_rule(text: str) -> tuple[str | None, dict[str, Any]]:
    """Parse a way of unmasking into a guide's model (or None) and request options:
    ``one``, a policy, or options such as ``threshold=0.9+block_add_threshold=0.2``;
    with a guide ``guided=MODEL+guide_top_k=2``."""
    first, *parts = text.split("+")
    options: dict[str, Any] = (
        {"unmasking": first} if first in UNMASKING_POLICIES else {}
    )
    for part in parts if options or first == "one" else (first, *parts):
        name, equals, value = part.partition("=")
        if (name := name.replace("-", "_")) not in (*DENOISING, "passes") or not equals:
            raise ValueError(
                f"unmasking rule {text!r} is unknown; give one, guided=MODEL or one of "
                f"{', '.join(RULES)} as NAME=VALUE, and other options of requests "
                f"behind it as +NAME=VALUE"
            )
        options[name] = value if name == "guided" else json_value(value)
    return options.pop("guided", None), options


def as_words(options: dict[str, Any]) -> list[str]:
    """Options as words of a ``dllm serve`` command."""
    words = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "cache_options":
            words += [
                word
                for item in value.items()
                for word in ("--cache-option", assignments(dict([item])))
            ]
        elif isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, value if isinstance(value, str) else json.dumps(value)]
    return words
