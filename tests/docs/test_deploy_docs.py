"""What docs/deploy says is what the programs accept, and numbers of the docs are what
``dllm plan`` computes.
"""

import re
import shlex
from typing import Any

import pytest
import yaml
from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dllm_engine.cli.commands import build_parser
from dllm_engine.cli.main import main
from dllm_engine.cli.serve import vllm_arguments
from dllm_engine.memory import Deployment, plan
from dllm_engine.options import EngineOptions
from tests.support.checkout import CHECKOUT, DOCS

PAGE = (DOCS / "deploy.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"`(dllm serve [^`]+)`", PAGE)))
assert COMMANDS


def serve(arguments):
    """Arguments of ``dllm serve``, read by its parser and then by that of ``vllm
    serve``.
    """
    args, args.unknown = build_parser().parse_known_args(["serve", *arguments])
    read = make_arg_parser(FlexibleArgumentParser()).parse_args(
        vllm_arguments(args)[1:]
    )
    validate_parsed_serve_args(read)
    return read


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_are_accepted(command):
    serve(shlex.split(command)[2:])


def test_numbers_of_the_page_are_those_of_the_command(capsys):
    """Methods added since have lines of their own; the page's must still hold."""
    block = re.search(r"```\n\$ (dllm plan .*)\n((?:.*\n)*?)```", PAGE)
    assert main(shlex.split(block[1])[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in block[2].splitlines() if line not in printed] == []


def test_compose_runs_a_server_and_gives_it_time_to_drain():
    service = yaml.safe_load((DOCS / "deploy" / "compose.yaml").read_text())[
        "services"
    ]["dllm"]
    read = serve(service["command"])
    assert read.max_model_len == 2048
    assert (
        int(service["stop_grace_period"].removesuffix("s")) > read.shutdown_timeout > 0
    )
    assert (CHECKOUT / service["build"]["dockerfile"]).is_file()
    assert (DOCS / "deploy" / service["build"]["context"]).resolve() == CHECKOUT


def test_kubernetes_runs_a_server_and_gives_it_time_to_drain():
    documents = yaml.safe_load_all((DOCS / "deploy" / "kubernetes.yaml").read_text())
    specs = {document["kind"]: document["spec"] for document in documents}
    pod = specs["Deployment"]["template"]
    service = specs["Service"]
    (container,) = pod["spec"]["containers"]
    read = serve(container["args"])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > read.shutdown_timeout + pause
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/health"
        assert ports[container[probe]["httpGet"]["port"]] == read.port
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] in ports
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


# docs/quantization.md

MODELS = {
    "LLaDA-8B": "GSAI-ML/LLaDA-8B-Instruct",
    "Dream-7B": "Dream-org/Dream-v0-Instruct-7B",
    "LLaDA-MoE": "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
}
WEIGHTS = {"bfloat16": None, "INT8, FP8": "int8", "INT4": "int4"}
ROW = re.compile(
    r"^\| (\S+) \| ([^|]+) \| (\d+) \+ (\d+) \| ([\d/ –|]+) \|$", re.MULTILINE
)
ROWS = ROW.findall((DOCS / "quantization.md").read_text(encoding="utf-8"))
SIZES = [8, 12, 16, 24]
"""Of GPUs, in GiB: a column each."""


@pytest.mark.parametrize("row", ROWS[::9], ids=lambda row: " ".join(row[:4]))
def test_a_row_of_quantized_models_is_that_of_the_plans(row):
    model, weights, prompt, response, cells = row
    settings: dict[str, Any] = {
        "model": MODELS[model],
        "quantization": WEIGHTS[weights],
        "max_num_batched_tokens": 2048,
        "prompt": int(prompt),
        "response": int(response),
    }

    def requests(method, size):
        options = EngineOptions(cache_method=method)
        try:
            return str(
                plan(
                    Deployment(**settings, gpu_memory=size << 30, options=options)
                ).demand.requests
            )
        except ValueError:
            return "0"

    found = [
        " / ".join(requests(method, size) for method in ("dual", "sparse"))
        for size in SIZES
    ]
    assert [cell.replace("–", "0 / 0") for cell in cells.split(" | ")] == found
