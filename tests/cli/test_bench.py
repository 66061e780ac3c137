"""``dllm bench`` measures what its arguments ask for and writes it down."""

import json
from dataclasses import replace

import pytest

from dllm_engine.cli import bench
from dllm_engine.cli.main import main
from dllm_engine.evaluation.bench import Workload
from dllm_engine.evaluation.comparison import Comparison
from dllm_engine.evaluation.runner import MeasuredEngine
from tests.support.plans import FULL_METHODS


@pytest.fixture(autouse=True)
def loaded(engines, monkeypatch):
    """The benchmark's engines are those of the session; holds the arguments that they
    were asked for with.
    """
    arguments_of = []

    def load(arguments):
        arguments_of.append(arguments)
        limits = {
            "max_num_seqs": 4,
            "max_model_len": 256,
            "kv_cache_memory_bytes": 64 << 20,
        }
        method = arguments["cache_method"]
        llm = engines(
            "demo",
            cache_method=method,
            skip_tokenizer_init=False,
            trace=False,
            **limits,
        )
        monkeypatch.setattr(llm.llm_engine.engine_core, "shutdown", lambda: None)
        return llm

    monkeypatch.setattr(bench, "load", load)
    return arguments_of


@pytest.fixture
def measured(monkeypatch):
    """``measured(*arguments)``: the combinations and the workloads that a command line
    asks for.
    """

    def measured(*arguments):
        asked = []

        def refuse(comparison, *args):
            asked.append(args)
            raise ValueError

        monkeypatch.setattr(Comparison, "add", refuse)
        assert main(["bench", *arguments]) == 2
        return asked[0]

    return measured


def test_a_run_prints_a_table_and_writes_figures(loaded, tmp_path, capsys):
    output = tmp_path / "result.json"
    small = (
        f"--batch 1,2 --prompt 32 --response 16 --repeats 1 --output {output}"
    ).split()
    rules = ("one", "threshold=0.3")
    assert (
        main(
            [
                "bench",
                "--methods",
                "none,dual",
                "--unmasking",
                "one,threshold=0.3,steps=99",
                *small,
            ]
        )
        == 1
    )
    printed = capsys.readouterr()
    rows = [
        line.split()[:4]
        for line in printed.out.splitlines()
        if line.startswith(("none ", "dual "))
    ]
    assert rows == [
        [m, rule, batch, "32"]
        for m in ("none", "dual")
        for rule in rules
        for batch in ("1", "2")
    ]
    assert f"wrote {output}\n" in printed.out
    assert (
        "cannot be measured: dual steps=99 1 × 32: steps=99 is out of range"
        in printed.err
    )
    assert [arguments["cache_method"] for arguments in loaded] == ["none", "dual"]
    assert {arguments["max_num_batched_tokens"] for arguments in loaded} == {2 * 48}

    report = json.loads(output.read_text())
    assert report["command"].startswith("dllm bench --methods none,dual")
    assert report["machine"]["threads"] >= 1
    by_name = {
        (row["method"], row["unmasking"], row["task"]): row for row in report["rows"]
    }
    none = by_name["none", "one", "1 × 32"]
    dual = by_name["dual", "one", "1 × 32"]
    assert none["cost"]["forward_passes"] == dual["cost"]["forward_passes"]
    assert dual["cost"]["tokens_computed"] < none["cost"]["tokens_computed"]
    assert dual["cost"]["page_bytes"] > none["cost"]["page_bytes"] == 0
    assert (
        by_name["none", "threshold=0.3", "1 × 32"]["cost"]["forward_passes"]
        < none["cost"]["forward_passes"]
    )
    assert (
        none["result"]["details"]["lowest"]
        <= none["result"]["score"]
        <= none["result"]["details"]["highest"]
    )
    assert 0 < none["cost"]["first_block_seconds"] < none["cost"]["latency_seconds"]


def test_arguments_go_before_the_preset_and_the_defaults(measured):
    combinations, quick = measured("--quick", "--batch", "2", "--methods", "none")
    assert [(workload.batch, workload.prompt) for workload in quick] == [(2, 64)]
    assert [combination.unmasking for combination in combinations] == [
        "one",
        "tokens_per_step=4",
    ]
    combinations, workloads = measured()
    assert [(workload.batch, workload.prompt) for workload in workloads] == [
        (1, 128),
        (8, 128),
        (1, 512),
        (8, 512),
    ]
    assert [combination.method for combination in combinations] == list(FULL_METHODS)
    assert (
        combinations[0].decoding["gen_length"],
        combinations[0].engine["max_num_seqs"],
    ) == (64, 8)
    # vLLM's names, and a block diffusion model whose last block goes on behind the
    # response.
    asked = (
        "--model llada2-mini/16 --batch-size 2 --input_len 60 --output-len 20"
    ).split()
    combinations, workloads = measured(*asked)
    methods = [combination.method for combination in combinations]
    assert methods == ["block", "focus", "none"]
    assert combinations[0].engine["max_model_len"] == 96
    assert [(workload.batch, workload.prompt) for workload in workloads] == [(2, 60)]


def test_prompts_are_random_tokens_of_the_length_that_is_asked_for(engines, tiny_llada):
    llm = engines(tiny_llada)
    (first, params), (second, _) = Workload("", 2, 60, 1, 0).requests(llm, {})
    assert (len(first), len(second), params.ignore_eos) == (60, 60, True)
    assert first != second
    assert llm.model_config.hf_config.mask_token_id not in {*first, *second}


def test_shared_prompts_are_measured_with_and_without(measured, engines, tiny_llada):
    """The first of two requests does not count; the chats' turns begin with those
    before.
    """
    asked = "--shared-prompt 32 --prompt 48 --response 8 --methods dual,maskkv"
    combinations, workloads = measured(*asked.split(), "--repeats", "1")
    sharing = [(each.method, each.engine.get("share_prompts")) for each in combinations]
    assert sharing == [("dual", False), ("dual shared", True), ("maskkv", False)]
    assert combinations[0].engine["max_model_len"] == 48 + 2 * (16 + 8) + 8
    assert combinations[0].engine["max_num_seqs"] == 64
    second, chats = workloads
    chats = replace(chats, batch=3)
    llm = engines(
        tiny_llada,
        cache_method="dual",
        share_prompts=True,
        page_size=8,
        kv_cache_memory_bytes=16 << 20,
    )
    decoding = {"gen_length": 8, "block_length": 8, "steps": 1}
    engine = MeasuredEngine(llm)
    result = second.score(engine, decoding)
    assert result.score > 0
    assert engine.cost.requests == 1
    assert engine.cost.tokens_computed == 48 - 32 + 8
    engine = MeasuredEngine(llm)
    chats.score(engine, decoding)
    assert engine.cost.requests == 9
    # Later turns compute of the turns before only the last block of the response.
    first, later = (48 + 8) + 2 * (16 + 8), 6 * (8 + 16 + 8)
    assert engine.cost.tokens_computed == first + later


def test_a_shared_prompt_is_shorter_than_the_prompt(capsys):
    assert main(["bench", "--shared-prompt", "64", "--prompt", "64"]) == 2
    assert "--shared-prompt 64 is out of range: give less" in capsys.readouterr().err
