"""``dllm serve`` becomes a command line of ``vllm serve``."""

import json

import pytest

from dllm_engine.cli.commands import build_parser
from dllm_engine.cli.serve import vllm_arguments
from dllm_engine.demo import DEMO_MODELS, model_path


def arguments(*argv):
    args, args.unknown = build_parser().parse_known_args(["serve", *argv])
    return vllm_arguments(args)


def additional_config(*argv):
    result = arguments(*argv)
    return json.loads(result[result.index("--additional-config") + 1])


def test_vllms_options_are_passed_on():
    options = (
        "--port 8001 -tp 2 --enforce-eager --max_model_len=128 --gen-x_y a_b"
    ).split()
    assert arguments("some/model", *options) == ["serve", "some/model", *options]
    ours = ["--additional-config", '{"dllm": {"trace": true}}']
    assert arguments("some/model", *options[:2], "--trace", *options[2:]) == [
        "serve",
        "some/model",
        *ours,
        *options,
    ]


def test_the_demo_model_is_served_under_its_name():
    for name in DEMO_MODELS:
        assert arguments(name) == [
            "serve",
            model_path(name),
            "--served-model-name",
            name,
        ]
    assert arguments("demo", "--served_model_name=x") == [
        "serve",
        model_path("demo"),
        "--served_model_name=x",
    ]


SPARSE = {"cache_method": "sparse", "cache_options": {"update_delay": 0}}
"""Given in ``--additional-config`` where a command below ends with GIVEN."""
GIVEN = ["--additional-config", json.dumps({"dllm": SPARSE})]
PAPER = [
    "--additional-config",
    '{"dllm": {"cache_method": "sparse", "cache_options": "paper"}}',
]
STEPS_GIVEN = [
    "--additional-config",
    '{"dllm": {"request_defaults": {"steps": 8, "threshold": 0.5}}}',
]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            "--no-cuda-graphs --refresh-ratio 0.5".split(),
            {"cuda_graphs": False, "refresh_ratio": 0.5},
        ),
        (
            (
                "--cache_method sparse --cache-option update_delay=0 --page_size=16"
            ).split(),
            SPARSE | {"page_size": 16},
        ),
        # Cache options are added to those of the same method, and replace those of
        # another or of a paper.
        (
            [*GIVEN, "--retention-ratio", "0.25"],
            {
                "cache_method": "sparse",
                "cache_options": {"update_delay": 0, "retention_ratio": 0.25},
            },
        ),
        ([*GIVEN, "--cache-method", "dual"], {"cache_method": "dual"}),
        (
            [
                *PAPER,
                "--cache-option",
                "update_delay=0",
                "--cache-option",
                "retention_ratio=0.3",
                "--retention-ratio",
                "0.25",
            ],  # the last one of a name counts
            {
                "cache_method": "sparse",
                "cache_options": {"update_delay": 0, "retention_ratio": 0.25},
            },
        ),
        # What requests get by default.
        (
            (
                "--block-length 1k --unmasking random --threshold 0.9 "
                "--max-model-len 2k"
            ).split(),
            {
                "request_defaults": {
                    "block_length": 1000,
                    "unmasking": "random",
                    "threshold": 0.9,
                }
            },
        ),
        (
            (
                "--guide-model g --no-guided --guide-top-k 2 --guide-fallback draft"
            ).split(),
            {
                "guide_model": "g",
                "request_defaults": {
                    "guided": False,
                    "guide_top_k": 2,
                    "guide_fallback": "draft",
                },
            },
        ),
        (
            ["--steps", "64", *STEPS_GIVEN],
            {"request_defaults": {"steps": 64, "threshold": 0.5}},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_our_options_have_arguments_of_their_own(argv, expected):
    assert additional_config("m", *argv) == {"dllm": expected}


def test_what_others_have_in_an_additional_config_is_kept():
    asked = ["--additional_config", '{"other": 1}', "--trace"]
    assert additional_config("m", *asked) == {"other": 1, "dllm": {"trace": True}}


def test_a_dotted_additional_config_is_vllms_to_read_but_not_beside_our_options():
    dotted = ["--additional_config.dllm.cache_method", "sparse"]
    assert arguments("m", *dotted) == ["serve", "m", *dotted]
    with pytest.raises(ValueError, match="give --additional-config as JSON"):
        arguments("m", *dotted, "--trace")
