"""What an engine logs: errors and our warnings, unless vLLM's own settings say otherwise; one line on its pages."""

import logging
import re
import sys

import pytest

from dllm_engine import quiet
from dllm_engine.scheduler import request_queue
from tests.support.engines import scheduler_of, start_engine


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch):
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING", "DLLM_QUIET"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("variable", [None, "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_engine_is_quiet_where_nobody_says_what_to_log(monkeypatch, variable, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert quiet.quiet_arguments({"log_level": "INFO"}) == {}
    if variable is not None:
        monkeypatch.setenv(variable, "INFO")
    expected = {"log_level": "ERROR", "use_tqdm_on_load": is_terminal} if variable is None else {}
    assert quiet.quiet_arguments({}) == expected


def test_vllm_counts_the_pages_of_a_whole_request(engines, tiny_llada):
    """Its log line and metrics say how many requests of ``max_model_len`` the pool holds."""
    llm = engines(tiny_llada, cache_method="sparse", max_model_len=128, page_size=16, kv_cache_memory_bytes=1 << 20)
    cache = llm.llm_engine.vllm_config.cache_config
    pages = 2 * 4  # of each layer, for half of the 127 tokens outside a block of one
    num_pages = scheduler_of(llm).pages.num_pages + 1
    assert cache.kv_cache_max_concurrency == num_pages / pages
    assert cache.kv_cache_size_tokens == num_pages // pages * 128


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_method": "none"}, r"cache_method='none': every step computes the whole canvas, no pages are kept"),
        (
            {"cache_method": "sparse", "page_size": 16},
            r"cache_method='sparse' {'refresh': 'all', .*}: 127 pages of 16 tokens of one layer \(8.0KiB each, "
            r"together 1016.0KiB\) retain 1,008 tokens of each of the 2 layers",
        ),
    ],
    ids=["none", "sparse"],
)
def test_one_line_says_which_method_and_pages_are_in_use(monkeypatch, tiny_llada, settings, message):
    lines = []
    monkeypatch.setattr(request_queue.logger, "info", lambda text, *args: lines.append(text % args))
    start_engine(tiny_llada, max_model_len=128, kv_cache_memory_bytes=1 << 20, **settings)
    assert len(lines) == 1
    assert re.fullmatch(message, lines[0]), lines[0]


def test_a_quiet_engine_still_shows_our_warnings(monkeypatch):
    monkeypatch.setenv("DLLM_QUIET", "1")
    root, ours = logging.getLogger("vllm"), logging.getLogger("vllm.dllm_engine")
    for logger, level in ((root, logging.ERROR), (ours, logging.NOTSET)):
        monkeypatch.setattr(logger, "level", level)
    lines = []
    handler = logging.Handler("ERROR")
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(root, "handlers", [handler])
    quiet.keep_our_warnings()
    for who, name in (("ours", "vllm.dllm_engine.scheduler"), ("vllm", "vllm.v1.engine")):
        for severity in ("info", "warning", "error"):
            getattr(logging.getLogger(name), severity)(f"{who}: {severity}")
    assert lines == ["ours: warning", "ours: error", "vllm: error"]
