"""``dllm plan`` shows the sizing arithmetic, and the command that serves it."""

import argparse
import json

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dllm_engine.cli.main import build_parser, main
from dllm_engine.cli.plan import byte_size, share
from dllm_engine.cli.serve import vllm_arguments
from dllm_engine.memory.weights import QUANTIZATIONS
from tests.support.plans import FULL_METHODS

LLADA = ["plan", "GSAI-ML/LLaDA-8B-Instruct", "--gpu-memory", "80GiB", "--cache-method", "sparse"]


def planned(capsys, *argv):
    assert main([*argv]) == 0
    return capsys.readouterr().out


def test_a_row_per_cache_method_the_chosen_one_first(capsys):
    out = planned(capsys, *LLADA, "--prompt", "1024", "--response", "256")
    rows = out.split("CACHE METHOD")[1].splitlines()[1:]
    assert rows[0].split()[:6] == ["sparse", "*", "624", "of", "1,280", "640"]
    assert {row.split()[0] for row in rows[: len(FULL_METHODS)]} == set(FULL_METHODS)


def test_json_holds_bytes_and_the_command(capsys):
    sizing = json.loads(planned(capsys, *LLADA, "--cache-option", "retention_ratio=0.25", "--json"))
    assert sizing["page_bytes"] == 2 * 32 * 4096 * 2
    assert sizing["demand"]["pages"] == 32 * 10
    assert sizing["demand"]["bytes"] == 320 * sizing["page_bytes"]
    assert {d["cache_method"] for d in sizing["others"]} == set(FULL_METHODS) - {"sparse"}
    assert sizing["serve"][:3] == ["dllm", "serve", "GSAI-ML/LLaDA-8B-Instruct"]


def test_a_block_model_is_planned_with_its_own_method_and_with_prompts_in_parts(capsys):
    asked = ["plan", "JetLM/SDAR-8B-Chat", "--prompt", "16000", "--response", "4000", "--json"]
    on_gpu = json.loads(planned(capsys, *asked, "--gpu-memory", "80GiB"))
    assert on_gpu["demand"]["cache_method"] == "block"
    assert [other["cache_method"] for other in on_gpu["others"]] == ["none"]
    assert on_gpu["max_num_batched_tokens"] == 8192
    whole = json.loads(planned(capsys, *asked, "--gpu-memory", "80GiB", "--cache-method", "none"))
    assert whole["max_num_batched_tokens"] == 20000


def test_the_command_serves_with_the_plans_settings(capsys):
    """As `dllm serve` and vLLM's own parser read it."""
    settings = ["--page-size", "16", "--tensor-parallel-size", "2", "--dtype", "half", "--max-num-seqs", "9"]
    settings += ["--cache-option", "scope=prefix", "--json"]
    command = json.loads(planned(capsys, *LLADA, *settings))["serve"]
    args, args.unknown = build_parser().parse_known_args(command[1:])
    _, *passed_on = vllm_arguments(args)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("model_tag")
    read = parser.parse_args(passed_on)
    assert read.additional_config["dllm"]["page_size"] == 16
    assert read.additional_config["dllm"]["cache_options"] == {"scope": "prefix"}
    assert (read.tensor_parallel_size, read.dtype, read.max_num_seqs) == (2, "half", 9)
    assert (read.max_model_len, read.max_num_batched_tokens) == (1280, 8192)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_copy_to_serve_is_written_first(capsys, quantization):
    asked = ["plan", "demo", "--gpu-memory", "4GiB", "--prompt", "64", "--response", "64"]
    *_, before, last = planned(capsys, *asked, "--quantization", quantization).splitlines()
    if quantization == "fp8":  # made at load time
        assert before == ""
        assert last.startswith("To serve it so: dllm serve demo --")
        assert last.endswith("--quantization fp8_per_channel")
    elif quantization in ("gptq", "awq"):  # by their own tools
        assert before == ""
        assert last.startswith(f"To serve it so: dllm serve demo-{quantization} --")
    else:
        groups = " --group-size 128" if quantization != "int8" else ""
        script = f"python examples/quantize.py demo demo-{quantization} --scheme {quantization}{groups}"
        assert before == f"To make the copy: {script}"
        assert last.startswith(f"To serve it so: dllm serve demo-{quantization} --")


def test_a_guide_is_counted_and_served(capsys):
    asked = ["plan", "demo", "--gpu-memory", "2GiB", "--prompt", "64", "--response", "64", "--guide-model", "demo"]
    assert "guide's weights" in planned(capsys, *asked)
    sizing = json.loads(planned(capsys, *asked, "--json"))
    assert sizing["demand"]["pages"] > 0
    assert sizing["serve"][-2:] == ["--guide-model", "demo"]


SIZES = {
    "80GiB": 80 << 30,
    "24GB": 24 * 10**9,
    "512MiB": 512 << 20,
    "1.5 gib": 3 << 29,
    "4194304": 4 << 20,
    "0": 0,
    "2T": 2 * 10**12,
}


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_sizes_have_units(text, size):
    assert byte_size(text) == size


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [(byte_size, text, "80GiB") for text in ("", "GiB", "80 horses", "-1GiB", "nan")]
    + [(share, text, "above 0, at most 1") for text in ("0", "1.1", "nan", "half", "-0.5")],
)
def test_sizes_and_shares_that_are_none_are_refused(read, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        read(text)
