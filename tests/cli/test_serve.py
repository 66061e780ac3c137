"""``dllm serve`` becomes a command line of ``vllm serve``."""

import json

import pytest

from dllm_engine.cli.errors import CommandError
from dllm_engine.cli.main import build_parser
from dllm_engine.cli.serve import vllm_arguments
from dllm_engine.demo import demo_model_path


def arguments(*argv):
    args, args.unknown = build_parser().parse_known_args(["serve", *argv])
    return vllm_arguments(args)


def additional_config(*argv):
    result = arguments(*argv)
    return json.loads(result[result.index("--additional-config") + 1])


def test_vllms_options_are_passed_on():
    options = ["--port", "8001", "-tp", "2", "--enforce-eager", "--max_model_len=128"]
    assert arguments("some/model", *options) == ["serve", "some/model", *options]


def test_our_options_may_stand_between_vllms():
    result = arguments("some/model", "--port", "8001", "--trace", "--api-key", "x")
    assert result == ["serve", "some/model", "--additional-config", '{"dllm": {"trace": true}}', *result[4:]]
    assert result[4:] == ["--port", "8001", "--api-key", "x"]


def test_the_demo_model_is_served_under_its_name():
    assert arguments("demo") == ["serve", demo_model_path(), "--served-model-name", "demo"]
    assert arguments("demo", "--served_model_name=x") == ["serve", demo_model_path(), "--served_model_name=x"]


def test_a_given_additional_config_is_kept():
    given = json.dumps({"other": 1, "dllm": {"trace": True}})
    assert additional_config("m", "--additional-config", given, "--cache-method", "none") == json.loads(given)
    assert additional_config("m", "--additional_config", '{"other": 1}', "--trace") == json.loads(given)


def test_the_cache_has_arguments_of_its_own():
    flags = ["--cache-method", "sparse", "--retention-ratio", "0.25", "--cache-option", "update_delay=0"]
    assert additional_config("m", *flags, "--page-size", "16") == {
        "dllm": {
            "cache_method": "sparse",
            "cache_options": {"update_delay": 0, "retention_ratio": 0.25},
            "page_size": 16,
        }
    }
    assert additional_config("m", "--page-size", "16") == {"dllm": {"page_size": 16}}
    assert additional_config("m", "--refresh-ratio", "0.5") == {"dllm": {"refresh_ratio": 0.5}}
    assert additional_config("m", "--steps-per-dispatch", "4") == {"dllm": {"steps_per_dispatch": 4}}
    assert additional_config("m", "--guide-tokens-per-token", "3") == {"dllm": {"guide_tokens_per_token": 3}}


def test_what_requests_get_by_default_has_arguments_too():
    flags = ["--block-length", "16", "--steps", "64", "--unmasking", "random", "--threshold", "0.9"]
    assert additional_config("m", *flags, "--max-model-len", "512") == {
        "dllm": {"request_defaults": {"block_length": 16, "steps": 64, "unmasking": "random", "threshold": 0.9}}
    }
    given = json.dumps({"dllm": {"request_defaults": {"steps": 8, "threshold": 0.5}}})
    assert additional_config("m", "--steps", "64", "--additional-config", given) == {
        "dllm": {"request_defaults": {"steps": 64, "threshold": 0.5}}
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--threshold", "1.5"], "request default threshold=1.5"),
        (["--block-length", "0"], "request default block_length=0"),
        (["--unmasking", "best"], "unmasking='best' is unknown"),
        (["--retention-ratio", "0.5"], "unknown cache option 'retention_ratio'=0.5"),
        (["--cache-method", "sparse", "--retention-ratio", "2"], "retention_ratio=2.0"),
        (["--cache-option", "retention_ratio=0.5", "--retention-ratio", "0.5"], "not both"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_out_of_range_are_refused_before_a_server_starts(argv, message):
    with pytest.raises((ValueError, CommandError)) as error:
        arguments("m", *argv)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--additional-config", "{"], "is not JSON"),
        (["--additional-config", "[1]"], "must be a JSON object"),
        (["--additional-config", '{"dllm": 1}'], "must be a JSON object"),
        (["--additional-config.dllm.trace", "true"], "as one JSON object"),
    ],
)
def test_an_additional_config_that_cannot_be_merged_is_refused(argv, problem):
    with pytest.raises(CommandError, match=problem):
        arguments("m", *argv)


@pytest.mark.parametrize("argv", [["--cache-option", "x=1"], ["--additional-config", '{"dllm": {"x": 1}}']])
def test_options_are_checked_before_a_server_starts(argv):
    with pytest.raises(ValueError, match="'x'=1"):
        arguments("m", *argv)
