"""``dllm serve`` becomes a command line of ``vllm serve``."""

import json
import socket
import subprocess
import sys

import pytest

from dllm_engine.cli.main import build_parser
from dllm_engine.cli.serve import add_config_file, check_flags, check_listening, stated_arguments, vllm_arguments
from dllm_engine.demo import DEMO_MODELS, demo_model_path


def arguments(*argv):
    args, args.unknown = build_parser().parse_known_args(["serve", *argv])
    return vllm_arguments(args)


def additional_config(*argv):
    result = arguments(*argv)
    return json.loads(result[result.index("--additional-config") + 1])


def test_vllms_options_are_passed_on():
    options = ["--port", "8001", "-tp", "2", "--enforce-eager", "--max_model_len=128", "--gen-x_y", "a_b"]
    assert arguments("some/model", *options) == ["serve", "some/model", *options]
    ours = ["--additional-config", '{"dllm": {"trace": true}}']
    assert arguments("some/model", *options[:2], "--trace", *options[2:]) == ["serve", "some/model", *ours, *options]


def test_the_demo_model_is_served_under_its_name():
    for name in DEMO_MODELS:
        assert arguments(name) == ["serve", demo_model_path(name), "--served-model-name", name]
    assert arguments("demo", "--served_model_name=x") == ["serve", demo_model_path(), "--served_model_name=x"]


SPARSE = {"cache_method": "sparse", "cache_options": {"update_delay": 0}}
"""Given in ``--additional-config`` where a command below ends with GIVEN."""
GIVEN = ["--additional-config", json.dumps({"dllm": SPARSE})]
PAPER = ["--additional-config", '{"dllm": {"cache_method": "sparse", "cache_options": "paper"}}']
STEPS_GIVEN = ["--additional-config", '{"dllm": {"request_defaults": {"steps": 8, "threshold": 0.5}}}']


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--no-cuda-graphs", "--refresh-ratio", "0.5"], {"cuda_graphs": False, "refresh_ratio": 0.5}),
        (["--steps-per-dispatch", "4", "--guide-tokens-per-token", "3"],
         {"steps_per_dispatch": 4, "guide_tokens_per_token": 3}),
        (["--cache_method", "sparse", "--cache-option", "update_delay=0", "--page_size=16"],
         SPARSE | {"page_size": 16}),
        # Cache options are added to those of the same method, and replace those of another or of a paper.
        ([*GIVEN, "--retention-ratio", "0.25"],
         {"cache_method": "sparse", "cache_options": {"update_delay": 0, "retention_ratio": 0.25}}),
        ([*GIVEN, "--cache-method", "dual"], {"cache_method": "dual"}),
        ([*PAPER, "--retention-ratio", "0.25"], {"cache_method": "sparse", "cache_options": {"retention_ratio": 0.25}}),
        # What requests get by default.
        (["--block-length", "1k", "--unmasking", "random", "--threshold", "0.9", "--max-model-len", "2k"],
         {"request_defaults": {"block_length": 1000, "unmasking": "random", "threshold": 0.9}}),
        (["--guide-model", "g", "--no-guided", "--guide-top-k", "2", "--guide-fallback", "draft"],
         {"guide_model": "g", "request_defaults": {"guided": False, "guide_top_k": 2, "guide_fallback": "draft"}}),
        (["--steps", "64", *STEPS_GIVEN], {"request_defaults": {"steps": 64, "threshold": 0.5}}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_our_options_have_arguments_of_their_own(argv, expected):
    assert additional_config("m", *argv) == {"dllm": expected}


@pytest.mark.parametrize("spelled", ["--additional-config", "--additional_config"])
def test_what_others_have_in_an_additional_config_is_kept(spelled):
    assert additional_config("m", spelled, '{"other": 1}', "--trace") == {"other": 1, "dllm": {"trace": True}}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--threshold", "1.5"], "request default threshold=1.5"),
        (["--block-length", "0"], "request default block_length=0"),
        (["--unmasking", "best"], "unmasking='best' is unknown"),
        (["--retention-ratio", "0.5"], "unknown cache option 'retention_ratio'=0.5"),
        (["--cache-method", "sparse", "--retention-ratio", "2"], "retention_ratio=2.0"),
        (["--cache-option", "x=1"], "'x'=1"),
        (["--additional-config", '{"dllm": {"x": 1}}'], "'x'=1"),
        (["--additional-config", "{"], "is not JSON"),
        (["--additional-config", "[1]"], "must be a JSON object"),
        (["--additional-config", '{"dllm": 1}'], "must be a JSON object"),
        (["--additional-config.dllm.trace"], "needs a value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_that_mean_nothing_are_refused_before_a_server_starts(argv, message):
    with pytest.raises(ValueError, match=message):
        arguments("m", *argv)


@pytest.mark.parametrize(
    ("flag", "closest"),
    [
        ("--cache-metod", "--cache-method"),
        ("--cache_metod=dual", "--cache-method"),
        ("--max-modle-len", "--max-model-len"),
        ("--aditional-config.dllm.trace", "--additional-config"),
    ],
)
def test_a_flag_that_nobody_knows_is_told_the_closest(flag, closest):
    parser = build_parser().parse_args(["serve", "demo"]).parser
    with pytest.raises(ValueError, match=f"is unknown; did you mean '{closest}'"):
        check_flags(parser, [flag, "1"])
    known = ["--port", "8001", "-tp", "2", "--enforce-eager", "--max_model_len=128", "--no-enable-prefix-caching"]
    check_flags(parser, [*known, "--hf-overrides.rope_theta", "5"])


def test_the_dotted_form_of_an_additional_config_is_merged():
    dotted = ["--additional-config.dllm.cache_method", "sparse", "--additional_config.other.x=1k"]
    more = ["--additional-config.dllm.cache_options.scorer=snapkv", "--retention-ratio", "0.25"]
    given = ["--additional-config", '{"dllm": {"cache_method": "dual", "page_size": 16}}']
    result = arguments("m", *given, *dotted, "--port", "8001", *more)
    assert result[-2:] == ["--port", "8001"]
    options = {"cache_method": "sparse", "page_size": 16}
    options["cache_options"] = {"scorer": "snapkv", "retention_ratio": 0.25}
    assert json.loads(result[3]) == {"other": {"x": 1000}, "dllm": options}


def with_config_file(path, *argv):
    args, args.unknown = build_parser().parse_known_args(["serve", *argv, "--config", str(path)])
    add_config_file(args)
    return vllm_arguments(args)


def test_a_config_file_holds_options_of_both_and_yields_to_the_command_line(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: other\ncache-method: sparse\nretention_ratio: 0.25\ntrace: true\nport: 8001\n"
        "enable-prefix-caching: false\nadditional-config: {other: {x: 1}, dllm: {page_size: 16}}\n"
    )
    result = with_config_file(path, "demo", "--retention-ratio", "0.5")
    assert result[:5] == ["serve", demo_model_path(), "--served-model-name", "demo", "--additional-config"]
    assert json.loads(result[5]) == {
        "other": {"x": 1},
        "dllm": {"cache_method": "sparse", "cache_options": {"retention_ratio": 0.5}, "page_size": 16, "trace": True},
    }
    assert result[6:] == ["--port", "8001", "--no-enable-prefix-caching"]


@pytest.mark.parametrize("text", [None, "- a\n", "model: [\n"])
def test_a_config_file_that_cannot_be_read_is_named(text, tmp_path):
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"serve\.yaml cannot be read"):
        with_config_file(path, "m")


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield str(listener.getsockname()[1])


def test_a_port_in_use_is_named_before_vllm_is_imported(taken_port):
    command = [sys.executable, "-X", "importtime", "-m", "dllm_engine.cli.main", "serve", "demo"]
    flags = ["--host=127.0.0.1", "--port", taken_port]
    process = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert process.returncode == 2
    (line,) = (line for line in process.stderr.splitlines() if not line.startswith("import time:"))
    assert line == (
        f"dllm: error: the server cannot listen on --host 127.0.0.1 --port {taken_port}: Address already in use; "
        "choose another"
    )
    assert "| vllm" not in process.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "nowhere.invalid"], "cannot listen on --host nowhere.invalid"),
        (["--host", "203.0.113.7"], "cannot listen on --host 203.0.113.7"),
        (["--host", "::5"], "cannot listen on --host ::5"),
        (["--port", "70000"], "cannot listen on --port 70000: bind.*0-65535"),
        (["--port=x"], "--port x is not a whole number"),
    ],
)
def test_an_address_that_cannot_be_had_is_named(flags, message):
    with pytest.raises(ValueError, match=message):
        check_listening(stated_arguments(flags))


def test_an_address_is_not_checked_where_none_is_listened_at(taken_port):
    for flags in (["--headless"], ["--uds", "socket"]):
        check_listening(stated_arguments(["--host", "127.0.0.1", "--port", taken_port, *flags]))
