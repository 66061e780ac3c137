"""A quiet engine: it logs vLLM's errors only, and this package's warnings and errors;
on a terminal, progress too.

Otherwise vLLM logs some 60 lines for one answer. It still does if
``VLLM_LOGGING_LEVEL`` or another of its logging settings is set.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_VARIABLES = (
    "VLLM_LOGGING_LEVEL",
    "VLLM_LOGGING_CONFIG_PATH",
    "VLLM_CONFIGURE_LOGGING",
)
_ARGUMENTS = ("log_level", "logging_config", "log_config_file")
_MARK = "DLLM_QUIET"
"""Variable that tells the engine's processes to be quiet; not for users."""


def quiet_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` that keep it quiet; none if the environment or
    ``arguments`` set what to log.
    """
    if any(name in os.environ for name in _VARIABLES) or any(
        arguments.get(name) for name in _ARGUMENTS
    ):
        return {}
    os.environ[_MARK] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # On a terminal, loading that takes long shows how far it is.
    return {"log_level": "ERROR", "use_tqdm_on_load": sys.stderr.isatty()}


def be_quiet() -> None:
    """For commands: only the answer on stdout, messages on stderr, and vLLM quiet from
    its import on.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if not quiet_arguments({}):
        return
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    # For messages before vLLM sets up its own handler, which replaces this one.
    logging.getLogger("vllm").addHandler(logging.NullHandler())
    warnings.simplefilter("ignore", FutureWarning)
    # Without Triton, as in a CPU installation, PyTorch warns that it finds no kernels.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


@contextmanager
def progress_line(text: str, *, shown: bool = True) -> Iterator[None]:
    """Say on a terminal what takes so long, while it does; not where vLLM logs it."""
    shown = shown and os.environ.get(_MARK) == "1" and sys.stderr.isatty()
    if shown:
        print(f"{text} …", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # clears the line


def keep_our_warnings() -> None:
    """Show this package's warnings in a quiet engine's process, once vLLM has set up
    logging there.
    """
    root = logging.getLogger("vllm")
    if os.environ.get(_MARK) != "1" or root.level <= logging.WARNING:
        return
    logging.getLogger("vllm.dllm_engine").setLevel(logging.WARNING)
    for handler in root.handlers:
        handler.setLevel(
            logging.WARNING
        )  # vLLM's own records are filtered by their logger's level
