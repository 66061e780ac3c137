"""Options of ``vllm serve``, parsed from vLLM's sources: importing them takes seconds,
and a mistyped name or value should be reported at once.
"""

import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from dllm_engine.text import did_you_mean

_SOURCES = ("engine/arg_utils.py", "entrypoints/*/cli_args.py")
"""Files that declare options, in vLLM's folder."""
_FLAG = re.compile(r'"--([a-z][\w-]*)"()')
_FIELD = re.compile(r"^    ([a-z]\w*): (?:(\w+)(?: \| None)? =)?", re.MULTILINE)
"""A field of a dataclass, which defines an option of the same name, and its type."""
_LITERAL = re.compile(
    r'^(\w+)(?:: TypeAlias)? = Literal\[((?:\s*"[\w.-]+",?)+)\s*\]', re.MULTILINE
)
"""A type with a fixed set of texts, in vLLM's configs."""
_SWITCH = re.compile("^(no-)?(enable-|disable-)?")
"""vLLM 0.33 takes ``--enable-lora`` and ``--disable-lora`` where it declares one."""
_NUMBER = re.compile("[0-9]|^(auto|inf)$", re.IGNORECASE)
"""Pattern in texts that options with numbers accept."""
_A_NUMBER = "a number"


def serve_options() -> dict[str, str]:
    """Values that each option takes, by name with dashes: a number, one of some texts,
    or an empty string if unknown. Some of the names are not options. Empty if vLLM or
    one of its files is missing.
    """
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return {}
    folder = Path(package.origin).parent
    kinds = dict.fromkeys(("int", "float"), _A_NUMBER)
    for file in folder.glob("config/*.py"):
        for name, texts in _LITERAL.findall(file.read_text(encoding="utf-8")):
            kinds[name] = ", ".join(re.findall(r'"(.*?)"', texts))
    options = {"help": ""}
    for pattern in _SOURCES:
        files = [*folder.glob(pattern)]
        if not files:
            return {}
        for file in files:
            text = file.read_text(encoding="utf-8")
            for name, kind in (*_FLAG.findall(text), *_FIELD.findall(text)):
                name = name.replace("_", "-")
                options[name] = kinds.get(kind) or options.get(name, "")
    return options


def is_option(name: str, known: Iterable[str]) -> bool:
    """Return True for one of the names, for its beginning (which vLLM accepts too), and
    for both after a prefix that switches it on or off.
    """
    stem = _SWITCH.sub("", name)
    return any(_SWITCH.sub("", option).startswith(stem) for option in known)


def check_serve_options(words: Sequence[str], own_flags: Iterable[str]) -> None:
    """Raise ``ValueError`` if ``vllm serve`` certainly does not accept ``words`` after
    a model. ``own_flags``: our options, which a mistyped one may have meant.
    """
    if words and not words[0].startswith("-"):
        raise ValueError(f"{words[0]!r} is one argument too many, behind the model")
    options = serve_options()
    for word, following in zip(words, [*words[1:], None], strict=False):
        text, equals, value = word.partition("=")
        option = text.partition(".")[0]
        name = option.removeprefix("--").replace("_", "-")
        if not options or name == option or " " in name:
            continue  # a value, or a one-letter option
        if not is_option(name, options):
            flags = [*own_flags, *(f"--{name}" for name in options)]
            raise ValueError(
                f"{option} is unknown{did_you_mean(option, flags)} (`dllm serve "
                f"--help` lists this command's options, `vllm serve --help=all` those "
                f"of vLLM)"
            )
        argument = value if equals else following
        wanted = options.get(name)
        if not wanted or argument in ("", "none", "None"):
            continue
        if wanted == _A_NUMBER:
            fits = bool(_NUMBER.search(argument or ""))
        else:
            fits = argument in wanted.split(", ")
        if not fits:
            raise ValueError(f"{option} takes {wanted}, not {argument!r}")
