"""``dllm serve --config FILE``: one file for the model, our options and vLLM's."""

import json

import pytest

from dllm_engine.cli.commands import build_parser
from dllm_engine.cli.serve import vllm_arguments
from dllm_engine.demo import model_path

DEMO = ["serve", model_path("demo"), "--served-model-name", "demo"]


@pytest.fixture
def arguments(tmp_path):
    """``arguments(text, *words)``: the command line of ``vllm`` for ``dllm serve
    --config FILE WORDS``.
    """

    def arguments(text, *words):
        file = tmp_path / "c.yaml"
        file.write_text(text)
        args, args.unknown = build_parser().parse_known_args(
            ["serve", *words, "--config", str(file)]
        )
        return vllm_arguments(args)

    return arguments


def ours_in(words):
    return json.loads(words[words.index("--additional-config") + 1])["dllm"]


def test_the_file_alone_names_model_and_options(arguments):
    words = arguments(
        "model: demo\ncache_method: sparse\ncache-option:\n  update_delay: "
        "0\nretention-ratio: 0.25\ncuda_graphs: false\ntrace: true\nblock-length: "
        "8\nport: 8001\nmax_model_len: 2k\n"
    )
    assert words[:4] == DEMO
    assert words[6:] == "--port 8001 --max-model-len 2k".split()
    assert ours_in(words) == {
        "cache_method": "sparse",
        "cache_options": {"update_delay": 0, "retention_ratio": 0.25},
        "cuda_graphs": False,
        "trace": True,
        "request_defaults": {"block_length": 8},
    }


def test_vllms_options_become_words_as_vllm_makes_them(arguments):
    words = arguments(
        "model: demo\nenforce-eager: true\nenable-prefix-caching: false\nheadless: "
        "false\nallowed-origins: ['[\"a\"]']\noverride-generation-config: "
        "{max_new_tokens: 32}\n"
    )
    assert words[4:] == [
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--allowed-origins",
        '["a"]',
        "--override-generation-config",
        '{"max_new_tokens": 32}',
    ]


def test_the_command_line_goes_before_the_file(arguments):
    text = (
        "model: other/model\nport: 8001\ncache_method: sparse\ncache_option: "
        "[update_delay=0]\nthreshold: 0.9\n"
    )
    words = arguments(
        text, "demo", "--port", "8002", "--cache-method", "dual", "--factor", "1.5"
    )
    assert words[:4] == DEMO
    assert words[6:] == "--port 8001 --port 8002".split()  # the last one counts
    assert ours_in(words) == {
        "cache_method": "dual",
        "request_defaults": {"factor": 1.5},
    }
    same_method = ours_in(
        arguments(text, "--cache_method=sparse", "--cache-option", "update_delay=1")
    )
    assert same_method["cache_options"] == {"update_delay": 1}
    assert arguments("trace: true", "demo")[:4] == DEMO


def test_an_additional_config_in_the_file_is_kept(arguments):
    text = (
        "model: demo\nadditional-config: {other: 1, dllm: {cache_method: "
        "sparse}}\npage-size: 16\n"
    )
    words = arguments(text)
    assert json.loads(words[5]) == {
        "other": 1,
        "dllm": {"cache_method": "sparse", "page_size": 16},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trace: true", "c.yaml: key 'model' must name the model; or give MODEL"),
        ("model: [demo]", "c.yaml: key 'model' must name the model"),
        (
            "model: demo\ncache_metod: sparse",
            "c.yaml: key 'cache-metod' is unknown; did you mean 'cache-method'?",
        ),
        ("model: demo\nprot: 1", "c.yaml: key 'prot' is unknown; did you mean 'port'?"),
        (
            "model: demo\npage_size: many",
            "c.yaml: page-size: 'many' must be a whole number",
        ),
        ("model: demo\nguide-fallback: x", "c.yaml: guide-fallback: 'x' is unknown"),
        ("model: demo\ntrace: 7", "c.yaml: trace must be true or false, not 7"),
        ("model: demo\ncache-method:", "c.yaml: cache-method has no value"),
        (
            "model: demo\ncache-option: [a]",
            "c.yaml: cache-option: 'a' must have the form KEY=VALUE",
        ),
        ("- demo", "c.yaml holds a list; write a line"),
        ("a: [", "c.yaml cannot be read: while parsing"),
    ],
)
def test_errors_name_the_file_and_the_key(arguments, capsys, text, message):
    with pytest.raises(SystemExit) as ended:
        arguments(text)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config"], "--config names no file"),
        ("--config a.yaml --config=b.yaml".split(), "--config is given 2 times"),
        (["--config", "missing.yaml"], "--config missing.yaml cannot be read: "),
        (["--config=a.json"], "--config a.json: give a YAML file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(capsys, words, message):
    with pytest.raises(SystemExit):
        build_parser().parse_known_args(["serve", *words])
    assert message in capsys.readouterr().err
