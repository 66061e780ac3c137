"""Options of ``vllm serve`` as its sources declare them, beside its own parser."""

import argparse
from importlib.machinery import ModuleSpec

import pytest
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dllm_engine.vllm_hooks import serve_options
from dllm_engine.vllm_hooks.serve_options import check_serve_options, is_option


@pytest.fixture(scope="module")
def parser():
    return make_arg_parser(FlexibleArgumentParser())


def test_every_option_is_known(parser):
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    assert len(flags) > 300
    known = serve_options.serve_options()
    assert not [flag for flag in flags if not is_option(flag[2:], known)]


def test_options_of_numbers_take_no_other_words(parser):
    kinds = serve_options.serve_options()
    numbers = [f"--{name}" for name, kind in kinds.items() if kind == "a number"]
    assert {"--port", "--max-model-len", "--gpu-memory-utilization"} <= {*numbers}
    for flag in numbers:
        with pytest.raises(argparse.ArgumentError):
            parser._get_value(parser._option_string_actions[flag], "many")


def test_texts_that_options_take_are_vllms(parser):
    kinds = serve_options.serve_options()
    texts = {name: kind.split(", ") for name, kind in kinds.items() if ", " in kind}
    assert {"dtype", "scheduling-policy", "log-level"} <= {*texts}
    for name, own in texts.items():
        choices = parser._option_string_actions[f"--{name}"].choices
        # A config checks what the parser does not.
        assert choices is None or {*own} == {*choices} - {None}
    with pytest.raises(ValueError, match=r"^--dtype takes auto, .*, not 'foo'"):
        check_serve_options(["--dtype", "foo"], ())


@pytest.mark.parametrize(
    "line",
    [
        "--port 8000 -tp 2 --enforce-eager --no-enable-prefix-caching",
        "--max-model-len=auto --max_num_seqs 1k --max-log-len None --max-log-len=",
        "--dtype bfloat16 --kv_cache_dtype=auto --log-level None --log-level=",
        "--gpu-memory 0.5 --hf-overrides.rope_scaling.factor 2 --help=all",
        "-O.level 3 --additional-config.dllm+ a --seed -1",
    ],
)
def test_what_vllm_takes_is_passed_on(line):
    check_serve_options(line.split(), ())
    check_serve_options(["--chat-template", "--a text with words"], ())


def test_without_vllms_files_nothing_is_refused(monkeypatch, tmp_path):
    for spec in (None, ModuleSpec("vllm", None, origin=str(tmp_path / "__init__.py"))):
        monkeypatch.setattr(serve_options, "find_spec", lambda name, spec=spec: spec)
        check_serve_options(["--nothing"], ())
