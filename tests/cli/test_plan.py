"""``dllm plan`` shows the sizing arithmetic, and the command that serves it."""

import json

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dllm_engine.cli.commands import build_parser
from dllm_engine.cli.main import main
from dllm_engine.cli.serve import vllm_arguments
from tests.support.plans import FULL_METHODS

LLADA = (
    "plan GSAI-ML/LLaDA-8B-Instruct --gpu-memory 80GiB --cache-method sparse"
).split()


def planned(capsys, *argv):
    assert main([*argv]) == 0
    return capsys.readouterr().out


def test_a_row_per_cache_method_the_chosen_one_first_and_the_same_in_json(capsys):
    rows = planned(capsys, *LLADA).split("CACHE METHOD")[1].splitlines()[1:]
    assert rows[0].split()[:6] == ["sparse", "*", "624", "of", "1,280", "640"]
    assert {row.split()[0] for row in rows[: len(FULL_METHODS)]} == set(FULL_METHODS)
    sizing = json.loads(planned(capsys, *LLADA, "--json"))
    assert (sizing["page_bytes"], sizing["demand"]["pages"]) == (2 * 32 * 4096 * 2, 640)
    assert sizing["demand"]["bytes"] == 640 * sizing["page_bytes"]
    assert {demand["cache_method"] for demand in sizing["others"]} == set(
        FULL_METHODS
    ) - {"sparse"}


def test_a_block_model_is_planned_with_its_own_method_and_with_prompts_in_parts(capsys):
    asked = (
        "plan JetLM/SDAR-8B-Chat --prompt 16000 --response 4000 "
        "--json --gpu-memory 80GiB"
    ).split()
    own = json.loads(planned(capsys, *asked))
    assert (own["demand"]["cache_method"], own["max_num_batched_tokens"]) == (
        "block",
        8192,
    )
    assert [other["cache_method"] for other in own["others"]] == ["focus", "none"]
    assert (
        json.loads(planned(capsys, *asked, "--cache-method", "none"))[
            "max_num_batched_tokens"
        ]
        == 20000
    )


def test_the_command_serves_with_the_plans_settings(capsys):
    settings = (
        "--page-size 16 --tensor-parallel-size 2 --dtype half --max-num-seqs 9"
    ).split()
    settings += "--cache-option scope=prefix --block-length 64 --json".split()
    command = json.loads(planned(capsys, *LLADA, *settings))["serve"]
    args, args.unknown = build_parser().parse_known_args(command[1:])
    _, *passed_on = vllm_arguments(args)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("model_tag")
    read = parser.parse_args(passed_on)
    assert read.additional_config["dllm"]["page_size"] == 16
    assert read.additional_config["dllm"]["cache_options"] == {"scope": "prefix"}
    assert read.additional_config["dllm"]["request_defaults"] == {"block_length": 64}
    assert (read.tensor_parallel_size, read.dtype, read.max_num_seqs) == (2, "half", 9)
    assert (read.max_model_len, read.max_num_batched_tokens) == (1280, 8192)


def test_a_quantized_copy_is_served_under_its_own_name_and_fp8_made_at_load_time(
    capsys,
):
    asked = (
        "plan demo --gpu-memory 4GiB --prompt 64 --response 64 --quantization"
    ).split()
    fp8, int4 = (
        planned(capsys, *asked, name).splitlines()[-1] for name in ("fp8", "int4")
    )
    assert fp8.startswith("To serve it so: dllm serve demo --")
    assert fp8.endswith("--quantization fp8_per_channel")
    assert int4.startswith("To serve it so: dllm serve demo-int4 --")


def test_a_guide_is_counted_and_served(capsys):
    asked = (
        "plan demo --gpu-memory 2GiB --prompt 64 --response 64 --guide-model demo"
    ).split()
    assert "guide's weights" in planned(capsys, *asked)
    sizing = json.loads(planned(capsys, *asked, "--json"))
    assert sizing["demand"]["pages"] > 0
    assert sizing["serve"][-2:] == ["--guide-model", "demo"]
