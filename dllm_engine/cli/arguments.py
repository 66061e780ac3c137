"""The syntax of arguments: that of vLLM's command line, without importing vLLM."""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel

from dllm_engine.scheduler.options.request_fields import END_OPTIONS, GUIDE_OPTIONS, PARALLEL_OPTIONS, RequestOptions
from dllm_engine.scheduler.unmasking_policies import UNMASKING_POLICIES
from dllm_engine.text import choices, did_you_mean

_SUFFIXES = {suffix: 1000**power for power, suffix in enumerate("kmgt", start=1)}
_SUFFIXES |= {suffix: 1024**power for power, suffix in enumerate("KMGT", start=1)}

STRUCTURE = ("regex", "json_schema", "choice")
"""Arguments about what a response must match."""


class CommandParser(argparse.ArgumentParser):
    """Accepts options with underscores too (``--cache_method``); an error is one line, with the closest known name."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = sys.argv[1:] if args is None else args
        parsed, unknown = super().parse_known_args([self._with_dashes(word) for word in words], namespace)
        if unknown and not getattr(parsed, "passes_on_unknown", False):
            word = unknown[0]
            self.error(
                f"{word} is unknown{self.closest(word)}"
                if word.startswith("-")
                else f"{word!r} is one argument too many; put quotes around a text with spaces"
            )
        return parsed, unknown

    def format_help(self) -> str:
        """As argparse's, without a list of all options in the usage: they follow."""
        if self.usage is None:
            words = [action for action in self._actions if not action.option_strings]
            named = [self._get_formatter()._format_args(word, str(word.metavar)) for word in words]
            self.usage = " ".join((self.prog, "[options]", *named))
        return super().format_help()

    def closest(self, flag: str, others: Iterable[str] = ()) -> str:
        """The end of a message on an unknown flag: the closest one of this parser and ``others``."""
        return did_you_mean(self._with_dashes(flag).partition("=")[0], [*self._option_string_actions, *others])

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"dllm: error: {message} (`{self.prog} --help` lists what it takes)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"{value!r} is unknown{choices(value, map(str, action.choices))}")

    def _with_dashes(self, word: str) -> str:
        """``word`` with dashes if it is an option of this parser; vLLM's own options may have underscores."""
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        return dashed + equals + value if dashed in self._option_string_actions else word


def whole_number(text: str) -> int:
    """``8192``, or as in vLLM ``8k`` (8 × 1000) or ``8K`` (8 × 1024), also with m, g and t."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text):
        number = Fraction(match[1]) * _SUFFIXES[match[2]]
        if number.denominator == 1:
            return int(number)
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, such as 8192, 8k or 8K") from None


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return number


def positive_ints(text: str) -> list[int]:
    """Such numbers, with commas between."""
    return [positive_int(part) for part in text.split(",")]


def json_value(text: str) -> Any:
    """``text`` as JSON if it is JSON, as a number if it is one like ``8k``, else as it is."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return whole_number(text)
    except argparse.ArgumentTypeError:
        return text


def json_schema(text: str) -> dict[str, Any]:
    """A JSON object, or that of a file."""
    try:
        schema = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object and no file of one: {error}") from None
    if not isinstance(schema, dict):
        raise argparse.ArgumentTypeError(f"{text!r} holds a {type(schema).__name__}, not an object")
    return schema


def key_value(text: str) -> tuple[str, Any]:
    """``KEY=VALUE`` with a ``json_value``."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must have the form KEY=VALUE")
    return key, json_value(value)


ONE = "one"
"""The unmasking rule of one token per step."""
RULES = ("steps", "steps_per_block", "tokens_per_step", *PARALLEL_OPTIONS)
"""Options that another unmasking rule may set."""
MORE_OF_RULE = ("certainty_sigma", "block_add_threshold", "suffix_blocks")
"""Options that may follow an unmasking rule."""
GUIDED = "guided"
"""The unmasking rule that leaves the choice to a guide, whose model may be its value."""
GUIDING = GUIDE_OPTIONS
"""Arguments about how a guide decides, under the names of request options; they may follow that rule."""
DENOISING = (
    *("block_length", "unmasking", *RULES, *MORE_OF_RULE, "early_stop", *END_OPTIONS, "alg_temp"),
    *(GUIDED, *GUIDING),
)
"""Arguments about how a response is denoised, under the names of request options."""
_READ: dict[Any, tuple[Any, str]] = {
    int: (whole_number, "N"),
    float: (float, "R"),
    dict[str, Any]: (json_value, "JSON"),
}
"""Reader of an option's value, and its name in the help."""


def add_options(group: "argparse._ActionsContainer", options: type[BaseModel], names: Iterable[str]) -> None:
    """Options as arguments, with what their model says of each; None where it is not given."""
    for name in names:
        field = options.model_fields[name]
        kind, *_ = get_args(field.annotation) or (field.annotation,)
        read, metavar = _READ.get(kind, (kind, name.split("_")[-1].upper()))
        how: dict[str, Any] = {"type": read, "metavar": metavar}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif get_origin(kind) is Literal:
            how = {"choices": get_args(kind)}
        meaning, _, without = " ".join((field.description or "").split()).replace("``", "`").partition("None: ")
        default = without.rstrip(".") if field.default is None else str(field.default)
        meaning = (meaning[0].lower() + meaning[1:].rstrip(". ")).replace("%", "%%")
        meaning = f"{meaning} (default: {default})" if default else meaning
        group.add_argument(f"--{name.replace('_', '-')}", help=meaning, **how)


def add_value(
    group: "argparse._ActionsContainer", names: str, read: Any, metavar: str, meaning: str, **more: Any
) -> None:
    """An option with a value; ``names`` has spaces between."""
    group.add_argument(*names.split(), type=read, metavar=metavar, help=meaning, **more)


def add_denoising_arguments(group: "argparse._ArgumentGroup") -> None:
    """Options of requests; a request can set them itself under the same names."""
    alternatives = group.add_mutually_exclusive_group()
    for name in DENOISING:
        add_options(alternatives if name in PARALLEL_OPTIONS else group, RequestOptions, [name])


def take_dotted(words: list[str], option: str) -> tuple[dict[str, Any], list[str]]:
    """Take the dotted form of a JSON ``option`` out of ``words``: ``--option.a.b VALUE``, or ``--option.a.b+ X,Y``
    for lists.

    Returns:
        The object that they spell, and the other words.
    """
    spelled: dict[str, Any] = {}
    others = []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        stem, *keys = name.split(".")
        if not keys or stem.replace("_", "-") != option:
            others.append(word)
            continue
        if not equals and (value := next(remaining, "")) == "":
            raise ValueError(f"{name} needs a value")
        *parents, last = keys
        within = spelled
        for key in parents:
            within = within.setdefault(key, {})
            if not isinstance(within, dict):
                raise ValueError(f"{word}: {key!r} has a value already, so it cannot hold {last!r}")
        if last.endswith("+"):
            within.setdefault(last[:-1], []).extend(value.split(","))
        else:
            within[last] = json_value(value)
    return spelled, others


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Two JSON objects merged; where both have a value, that of ``above`` wins."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def split_names(text: str) -> list[str]:
    """Split at the commas before a name, not at those within a value (``es_dllm:keep_schedule=[[1,0],[0.5,0.25]]``)."""
    return re.split(r",(?=[a-z])", text)


def parse_method(text: str) -> list[tuple[str, dict[str, Any]]]:
    """A cache method and its options: ``sparse``, ``sparse:retention_ratio=0.25+pool_kernel_size=1``; several values,
    ``sparse:retention_ratio=0.25:0.5``, are as many methods with each other option."""
    method, _, given = text.partition(":")
    chosen = []
    for option in filter(None, given.split("+")):
        try:
            name, _ = key_value(option)
        except argparse.ArgumentTypeError:
            raise ValueError(f"method {text!r}: write its options as {method}:NAME=VALUE+NAME=VALUE") from None
        values = option.partition("=")[2].split(":")
        chosen.append([(name, json_value(value)) for value in values])
    return [(method, dict(options)) for options in itertools.product(*chosen)]


def method_text(method: str, options: dict[str, Any]) -> str:
    """As ``parse_method`` reads it."""
    return ":".join(filter(None, (method, "+".join(_assignment(*option) for option in options.items()))))


def as_words(options: dict[str, Any]) -> list[str]:
    """Options as words of ``dllm serve``."""
    words = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "cache_options":
            words += [word for pair in value.items() for word in ("--cache-option", _assignment(*pair))]
        elif isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, value if isinstance(value, str) else json.dumps(value)]
    return words


def _assignment(name: str, value: Any) -> str:
    """As ``key_value`` reads it."""
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def parse_rule(text: str) -> dict[str, Any]:
    """``one``, a policy, or an option and its value such as ``threshold=0.9``, as arguments of ``DiffusionParams``. For
    several blocks at once: ``threshold=0.9+block_add_threshold=0.2``."""
    return _parse_rule(text, f"{ONE} or {_ONE_OF_RULES}", RULES, MORE_OF_RULE)


def parse_guided_rule(text: str) -> tuple[str | None, dict[str, Any]]:
    """A guide's model, or None, and arguments of ``DiffusionParams``: as ``parse_rule``, or
    ``guided=MODEL+guide_top_k=2``."""
    if not text.startswith(f"{GUIDED}="):
        return None, _parse_rule(text, f"{ONE}, {GUIDED}=MODEL or {_ONE_OF_RULES}", RULES, MORE_OF_RULE)
    options = _parse_rule(text, f"{GUIDED}=MODEL", (GUIDED,), GUIDING)
    return str(options.pop(GUIDED)), options


_ONE_OF_RULES = f"one of {', '.join(RULES)} as NAME=VALUE"


def _parse_rule(text: str, known: str, rules: Sequence[str], more_of_rule: Sequence[str]) -> dict[str, Any]:
    if text in UNMASKING_POLICIES:
        return {"unmasking": text}
    rule, *more = text.split("+")
    options = {}
    for part, allowed in (*([] if rule == ONE else [(rule, rules)]), *((part, more_of_rule) for part in more)):
        name, equals, value = part.partition("=")
        name = name.replace("-", "_")
        if name not in allowed or not equals:
            raise ValueError(
                f"unmasking rule {text!r} is unknown; give {known}, and {' or '.join(more_of_rule)} behind it as "
                f"+NAME=VALUE"
            )
        options[name] = json_value(value)
    return options
