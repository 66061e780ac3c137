"""The default log of an engine: this package's lines and vLLM's warnings, without
warnings that mean nothing for it.

Otherwise vLLM logs some 100 lines before a server listens. It still does if
``VLLM_LOGGING_LEVEL`` or another of its logging settings is set.
"""

import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_VARIABLES = (
    "VLLM_LOGGING_LEVEL",
    "VLLM_LOGGING_CONFIG_PATH",
    "VLLM_CONFIGURE_LOGGING",
)
_ARGUMENTS = ("log_level", "logging_config", "log_config_file")
_MARK = "DLLM_QUIET"
"""Environment variable that makes the engine's processes quiet. Not for users."""
_ANSWERS, _SERVER = "answers", "server"
"""Its values: only warnings, or also information for the operator of a server."""

_LEVEL = "WARNING"
"""vLLM's log level in a quiet process."""

SILENCED: dict[str, tuple[str, ...]] = {
    # Triton is only for GPUs here; CPUs have other kernels.
    "vllm.triton_utils.importing": (
        "Triton is installed, but doesn't include CPU backend",
    ),
    "torch._library.triton": ("Triton not available",),
    # vLLM calls functions that PyTorch has deprecated.
    "torch._opaque_base": ("torch._opaque_base is deprecated",),
    "torch._library.opaque_object": (".* is deprecated, use",),
    # check_device says that there is no GPU.
    "torch.utils.cpp_extension": ("No CUDA runtime is found",),
    # As above. Diffusion models have no such cache.
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type"),
    # Our engines have another model runner on purpose, so vLLM's remarks do not apply.
    "vllm.config.vllm": (
        "Model Runner V2 requires Triton",
        "Inductor compilation was disabled",
    ),
    "vllm.config.scheduler": ("Using custom scheduler class dllm_engine",),
    # Here each request has a separate seed.
    "vllm.engine.arg_utils": ("The global random seed is set to",),
    # It is a variable of vLLM.
    "vllm.platforms.interface": (
        "Unknown vLLM environment variable detected: VLLM_DIST_IDENT",
    ),
    # docs/reference.md: a checkpoint's defaults count.
    "vllm.config.model": ("Default vLLM sampling parameters have been overridden",),
    # The error of the first chat says what is wrong, and `dllm bench` has no tokenizer.
    "vllm.renderers.base": ("Chat template warmup failed",),
    # The limit is enough for thousands of connections. The shutdown was requested, and
    # the exit status reports it.
    "vllm.utils.system_utils": (
        r"Found ulimit of \d{5}",
        r"\[shutdown\] force killing",
    ),
    "vllm.v1.utils": (r"\[shutdown\]",),
    "vllm.v1.executor.multiproc_executor": (r"\[shutdown\]",),
    # A client's mistake. One line of ours says what was refused, and why.
    "vllm.entrypoints.openai.chat_completion.serving": ("Error with model",),
    "vllm.entrypoints.openai.chat_completion.batch_serving": ("Error with model",),
    "vllm.entrypoints.openai.responses.serving": ("Error with model",),
    "vllm.entrypoints.scale_out.render.serving": ("Error with model",),
    "vllm.entrypoints.scale_out.token_in_token_out.serving": ("Error with model",),
    # Our line with the server's address replaces these.
    "uvicorn.error": (
        "(Started|Finished) server process",
        "Waiting for",
        "Application (startup|shutdown) complete",
        "Shutting down",
    ),
}
"""Patterns for the beginnings of lines that are not logged, by logger."""
_SHOWN = ("vllm.dllm_engine", "vllm.v1.metrics.loggers")
"""Loggers whose information a server also shows: ours, and vLLM's rates."""


class _Silence(logging.Filter):
    """Logging filter that drops lines of ``SILENCED``."""

    def __init__(self, beginnings: Iterable[str]) -> None:
        super().__init__()
        self._pattern = re.compile("|".join(beginnings))

    def filter(self, record: logging.LogRecord) -> bool:
        return self._pattern.match(record.getMessage()) is None


def _states_what_to_log(arguments: Mapping[str, Any]) -> bool:
    """Return True if the environment, or ``arguments`` of vLLM, configure the log."""
    level = os.environ.get("VLLM_LOGGING_LEVEL", _LEVEL)
    is_ours = _MARK in os.environ and level == _LEVEL
    variables = () if is_ours else _VARIABLES
    return any(name in os.environ for name in variables) or any(
        arguments.get(name) for name in _ARGUMENTS
    )


def silence_alarms() -> None:
    """Drop the lines of ``SILENCED`` in this process, unless the environment configures
    the log.
    """
    if _states_what_to_log({}):
        return
    _set_filters(silent=True)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read at PyTorch's import
    # vLLM uses the deprecated name.
    deprecated = "`torch.distributed.reduce_op` is deprecated"
    warnings.filterwarnings("ignore", deprecated, FutureWarning)


def _set_filters(*, silent: bool) -> None:
    for name, beginnings in SILENCED.items():
        logger = logging.getLogger(name)
        filters = [kept for kept in logger.filters if not isinstance(kept, _Silence)]
        logger.filters = [*filters, _Silence(beginnings)] if silent else filters


def continue_quietly() -> None:
    """Be as quiet as the process that started this one."""
    mode = os.environ.get(_MARK)
    if mode is None:
        return
    silence_alarms()
    if mode == _SERVER:
        _show_information()


def _show_information() -> None:
    to_stderr = os.environ.get("VLLM_LOGGING_STREAM") == "ext://sys.stderr"
    handler = logging.StreamHandler(sys.stderr if to_stderr else sys.stdout)
    form = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
    handler.setFormatter(logging.Formatter(form, "%m-%d %H:%M:%S"))
    for name in _SHOWN:
        # A separate handler, because vLLM's handler shows only warnings.
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [handler]
        logger.propagate = False


def quiet_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` that keep it quiet; none if the environment or
    ``arguments`` configure the log.
    """
    if _states_what_to_log(arguments):
        os.environ.pop(_MARK, None)
        _set_filters(silent=False)
        return {}
    os.environ[_MARK] = _ANSWERS
    # Python's resource tracker warns about resources that an engine leaves when it
    # ends, and removes them.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    silence_alarms()
    # On a terminal, ``progress_line`` says what the user waits for. vLLM's bars would
    # remain after it.
    return {"log_level": _LEVEL, "use_tqdm_on_load": False}


def be_quiet() -> None:
    """Set up the log of a command: only the answer on stdout, messages on stderr, and
    vLLM quiet from its import on.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if quiet_arguments({}):
        os.environ["VLLM_LOGGING_LEVEL"] = _LEVEL


def be_quiet_server(arguments: Mapping[str, Any]) -> bool:
    """Set up the log of ``dllm serve`` with these ``arguments`` of vLLM: our lines,
    vLLM's warnings and its rates. Return False if the environment or ``arguments``
    configure the log."""
    if not quiet_arguments(arguments):
        return False
    os.environ[_MARK] = _SERVER
    os.environ["VLLM_LOGGING_LEVEL"] = _LEVEL
    continue_quietly()
    return True


@contextmanager
def progress_line(text: str, *, shown: bool = True) -> Iterator[None]:
    """Show on a terminal what takes long, and how long it took the last time, while the
    block runs. Shows nothing if vLLM's log is not quiet.
    """
    shown = shown and _MARK in os.environ and sys.stderr.isatty()
    if shown:
        print(f"{text}{last_time(text)} …", end="", file=sys.stderr, flush=True)
    start = time.monotonic()
    try:
        yield
        if shown:
            remember_seconds(text, time.monotonic() - start)
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # clears the line


def _memory() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(folder, "dllm-engine", "seconds.json")


def _remembered() -> dict[str, float]:
    with suppress(OSError, ValueError):
        return dict(json.loads(_memory().read_text(encoding="utf-8")))
    return {}


def last_time(text: str) -> str:
    """The time that the start named ``text`` took the last time, in words."""
    seconds = _remembered().get(text)
    return "" if seconds is None else f" ({seconds:.0f} s the last time)"


def remember_seconds(text: str, seconds: float) -> None:
    """Store how long it took, for the next time. Nothing is stored if the folder cannot
    be written.
    """
    remembered = _remembered() | {text: round(seconds, 1)}
    file = _memory()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(json.dumps(remembered), encoding="utf-8")
        new.replace(file)
