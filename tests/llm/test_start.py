"""What is refused before an engine starts: arguments and models that mean nothing here.
And what one that starts logs: errors and our warnings, unless vLLM's own settings say
otherwise, and one line on its pages."""

import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import UnspecifiedPlatform

from dllm_engine import DiffusionParams, quiet
from dllm_engine.cli.main import main
from dllm_engine.demo import DEMO_GUIDE_DIR
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.scheduler import diffusion_scheduler
from tests.support.engines import generate, refuse_start, scheduler_of, start_engine

LLAMA = str(DEMO_GUIDE_DIR)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"cache_metod": "sparse"},
            "unknown argument 'cache_metod'; did you mean 'cache_method'?",
        ),
        (
            {"cache_method": "sparse", "cache_options": {"retention": 1}},
            "did you mean 'retention_ratio'?",
        ),
        (
            {"request_defaults": {"treshold": 0.9}},
            "takes no 'treshold'; did you mean 'threshold'?",
        ),
        (
            {"additional_config": {"dllm": {"trace": True}}},
            "LLM takes engine options as keyword arguments",
        ),
        (
            {"model": Path("/no/such/folder")},
            "model folder /no/such/folder does not exist",
        ),
        ({"decision_calibration": "/nowhere"}, "decision_calibration='/nowhere'"),
        (
            {"guide_model": "/no/such/folder"},
            "guide_model='/no/such/folder' cannot be loaded",
        ),
        (
            {"cache_method": "best"},
            "cache_method='best': unknown cache method; choose one of auto, block",
        ),
        ({"trace": "often"}, "trace='often'"),
        (
            {"max_automaton_seconds": 1e308},
            "max_automaton_seconds=1e+308: Input should be less than or equal to 86400",
        ),
        ({"model": ""}, "'' holds no config.json"),
        (
            {"speculative_config": {"model": "no/such-model"}},
            "speculative_config={'model': 'no/such-model'} is not supported",
        ),
        (
            {"cache_method": "dual", "kv_cache_memory_bytes": 1000},
            "kv_cache_memory_bytes=1000 is less than the ",
        ),
        (
            {"lora_path": "/nowhere"},
            "lora_path='/nowhere' is not a folder; download the adapter and name its "
            "folder",
        ),
    ],
    ids=str,
)
def test_an_argument_that_means_nothing_is_refused(tiny_llada, settings, message):
    settings = {"model": tiny_llada} | settings
    refuse_start(settings.pop("model"), message, **settings)


@pytest.mark.parametrize("start", [start_engine, lambda name: main(["serve", name])])
def test_a_machine_without_the_device_of_its_vllm_is_told(monkeypatch, capsys, start):
    monkeypatch.setattr("vllm.platforms._current_platform", UnspecifiedPlatform())
    try:
        start("demo")
    except ValueError as error:
        print(error, file=sys.stderr)
    assert "found no GPU, and this build needs one" in capsys.readouterr().err


UNSUPPORTED = r"of architecture LlamaForCausalLM: .*supported: LLaDAModelLM \(LLaDA\), .*DreamModel \(Dream\)"


def test_a_llama_is_refused_with_our_options():
    with pytest.raises(ValueError, match=UNSUPPORTED):
        start_engine(LLAMA, cache_method="sparse")
    with pytest.raises(ValueError, match=UNSUPPORTED):
        vllm.LLM(
            LLAMA,
            additional_config={"dllm": {"cache_method": "sparse"}},
            max_model_len=64,
        )


def test_stock_vllm_takes_a_llama_without_our_options():
    config = EngineArgs(
        LLAMA, max_model_len=64, additional_config={"other": 1}
    ).create_engine_config()
    assert config.model_config.architecture == "LlamaForCausalLM"
    assert config.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize("cache_method", ["block", "none"])
@pytest.mark.parametrize(
    "settings",
    [
        {"dense_attention": "flash"},
        {"dense_attention": "sdpa"},
        {"guide_model": "demo"},
    ],
    ids=str,
)
def test_what_attention_by_blocks_has_no_use_for_is_refused(
    tiny_sdar, cache_method, settings
):
    (name,) = settings
    with pytest.raises(
        ValueError,
        match=f"^{name}=.*: attention of SDAR goes by blocks, .* leave {name} unset",
    ):
        start_engine(tiny_sdar, cache_method=cache_method, **settings)


def test_a_block_that_no_step_has_room_for_is_refused_when_it_is_asked_for(
    engines, tiny_llada2
):
    """An engine has room for a block of its own, however few rows it is given."""
    llm = engines(tiny_llada2, max_num_batched_tokens=4, max_num_seqs=4)
    asked: dict[str, Any] = {"gen_length": 8, "ignore_eos": True}
    with pytest.raises(
        InvalidRequestError,
        match=r"^block_length=9: .* max_num_batched_tokens=8 rows; lower",
    ):
        generate(llm, [[5, 6, 7]], DiffusionParams(block_length=9, **asked))
    (output,) = generate(llm, [[*range(30)]], DiffusionParams(**asked))
    assert len(output.outputs[0].token_ids) == 8


@pytest.fixture
def nothing_asked_for(monkeypatch):
    for name in (
        "VLLM_LOGGING_LEVEL",
        "VLLM_LOGGING_CONFIG_PATH",
        "VLLM_CONFIGURE_LOGGING",
        "DLLM_QUIET",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "variable",
    [None, "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"],
)
def test_an_engine_is_quiet_where_nobody_says_what_to_log(
    nothing_asked_for, monkeypatch, variable
):
    assert quiet.quiet_arguments({"log_level": "INFO"}) == {}
    if variable is not None:
        monkeypatch.setenv(variable, "INFO")
    expected = (
        {"log_level": "WARNING", "use_tqdm_on_load": False} if variable is None else {}
    )
    assert quiet.quiet_arguments({}) == expected


def test_vllm_counts_the_pages_of_a_whole_request(engines, tiny_llada):
    """Its log line and metrics say how many requests of ``max_model_len`` the pool
    holds.
    """
    llm = engines(
        tiny_llada,
        cache_method="sparse",
        max_model_len=128,
        page_size=16,
        kv_cache_memory_bytes=1 << 20,
    )
    cache = llm.llm_engine.vllm_config.cache_config
    pages = 2 * 4  # of each layer, for half of the 127 tokens outside a block of one
    num_pages = scheduler_of(llm).pages.num_pages + 1
    assert cache.kv_cache_max_concurrency == num_pages / pages
    assert cache.kv_cache_size_tokens == num_pages // pages * 128


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"cache_method": "none"},
            r"cache_method='none': every step computes the whole canvas, no pages are kept",
        ),
        (
            {"cache_method": "sparse", "page_size": 16},
            r"cache_method='sparse' {'retention_ratio': 0.5, .*}: 127 pages of 16 tokens of one layer \(8.0KiB each, "
            r"together 1016.0KiB\) retain 1,008 tokens of each of the 2 layers",
        ),
    ],
    ids=["none", "sparse"],
)
def test_one_line_says_which_method_and_pages_are_in_use(
    nothing_asked_for, lines_of, tiny_llada, settings, message
):
    lines = lines_of(diffusion_scheduler.logger, "info")
    start_engine(
        tiny_llada, max_model_len=128, kv_cache_memory_bytes=1 << 20, **settings
    )
    assert len(lines) == 1
    assert re.fullmatch(message, lines[0]), lines[0]


@pytest.fixture
def logged(nothing_asked_for, monkeypatch):
    """Logs a line, and returns it if it is shown."""
    lines = []
    handler = logging.Handler("INFO")
    handler.emit = lambda record: lines.append(record.getMessage())

    def log(name, line):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [handler]
        logger.warning(line)
        return lines.pop() if lines else None

    yield log
    for name in quiet.SILENCED:
        logger = logging.getLogger(name)
        logger.handlers, logger.level, logger.filters = [], logging.NOTSET, []


ALARM = ("vllm.v1.utils", "[shutdown] Process manager: force killing")
WARNING = ("vllm.v1.utils", "A process has failed")


def test_a_quiet_engine_drops_alarms_alone(logged):
    quiet.quiet_arguments({})
    assert logged(*ALARM) is None
    assert logged(*WARNING) == WARNING[1]


@pytest.mark.parametrize("setting", ["variable", "argument"])
def test_who_says_what_to_log_sees_everything(logged, monkeypatch, setting):
    quiet.quiet_arguments({})
    if setting == "variable":
        monkeypatch.delenv("DLLM_QUIET")
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    quiet.quiet_arguments({"log_level": "DEBUG"} if setting == "argument" else {})
    assert logged(*ALARM) == ALARM[1]


def test_every_silenced_line_is_one_that_vllm_logs():
    """So that none stays in the table when a release drops it."""
    for name, beginnings in quiet.SILENCED.items():
        if name.startswith("vllm."):
            file = Path(vllm.__file__).parent.parent / (name.replace(".", "/") + ".py")
            source = re.sub(r'"\s*\n\s*"', "", file.read_text(encoding="utf-8"))
            for beginning in beginnings:
                literal = beginning.replace(r"\[", "[").replace(r"\]", "]")
                literal = re.split(r"\\| dllm_|VLLM_", literal)[0]
                assert literal in source, (name, beginning)


def test_the_time_that_something_took_is_said_the_next_time(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert quiet.last_time("Importing") == ""
    quiet.remember_seconds("Importing", 12.34)
    assert quiet.last_time("Importing") == " (12 s the last time)"


def test_a_terminal_alone_sees_and_keeps_what_takes_so_long(
    nothing_asked_for, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quiet.quiet_arguments({})
    with quiet.progress_line("Waiting"):
        pass
    assert capsys.readouterr().err == quiet.last_time("Waiting") == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with quiet.progress_line("Waiting"):
        pass
    assert capsys.readouterr().err == "Waiting …\r\x1b[K"
    assert quiet.last_time("Waiting") == " (0 s the last time)"
