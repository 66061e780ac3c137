"""``dllm bench`` measures what its arguments ask for and writes it down."""

import json

import pytest

from dllm_engine.cli import bench
from dllm_engine.cli.main import main
from dllm_engine.evaluation import runner
from dllm_engine.evaluation.bench import Workload
from tests.support.plans import FULL_METHODS


@pytest.fixture(autouse=True)
def loaded(engines, monkeypatch):
    """The benchmark's engines are those of the session; holds the arguments that they were asked for with."""
    arguments_of = []

    def load(arguments):
        arguments_of.append(arguments)
        limits = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
        return engines("demo", cache_method=arguments["cache_method"], skip_tokenizer_init=False, trace=False, **limits)

    monkeypatch.setattr(bench, "load", load)
    monkeypatch.setattr(runner, "stop_engine", lambda llm: None)
    return arguments_of


@pytest.fixture
def measured(monkeypatch):
    """``measured(*arguments)``: the combinations and the workload that a command line asks for."""

    def measured(*arguments):
        asked = []
        monkeypatch.setattr(bench, "measure", lambda *args: asked.append(args[:2]) or [])
        assert main(["bench", *arguments]) == 0
        return asked[0]

    return measured


SMALL = ["--batch", "1,2", "--prompt", "32", "--response", "16", "--repeats", "1"]


def test_a_run_prints_a_table_and_writes_figures(loaded, tmp_path, capsys):
    output = tmp_path / "result.json"
    asked = ["--methods", "none,dual", "--unmasking", "one,threshold=0.9,steps=99", *SMALL, "--output", str(output)]
    assert main(["bench", *asked]) == 1
    printed = capsys.readouterr()
    rows = [line.split()[:4] for line in printed.out.splitlines() if line.startswith(("none ", "dual "))]
    rules = ("one", "threshold=0.9")
    assert rows == [[m, rule, batch, "32"] for m in ("none", "dual") for rule in rules for batch in ("1", "2")]
    assert f"wrote {output}" in printed.out
    assert "cannot be measured: dual steps=99 1 32: steps=99 is out of range" in printed.err
    assert [arguments["cache_method"] for arguments in loaded] == ["none", "dual"]
    assert {arguments["max_num_batched_tokens"] for arguments in loaded} == {2 * 48}

    report = json.loads(output.read_text())
    assert report["command"].startswith("dllm bench --methods none,dual")
    assert report["machine"]["threads"] >= 1
    cells = {(cell["method"], cell["unmasking"], cell["batch"]): cell for cell in report["cells"]}
    none, dual = cells["none", "one", 1], cells["dual", "one", 1]
    assert none["passes_per_answer"] == dual["passes_per_answer"]
    assert dual["rows_per_token"] < none["rows_per_token"]
    assert dual["pages_mib"] > none["pages_mib"] == 0
    assert cells["none", "threshold=0.9", 1]["passes_per_answer"] < none["passes_per_answer"]
    assert none["over_none"] == 1
    assert dual["over_none"] == dual["tokens_per_second"] / none["tokens_per_second"]
    assert none["lowest"] <= none["tokens_per_second"] <= none["highest"]
    assert 0 < none["first_block_seconds"] < none["latency_seconds"]

    # Two files side by side
    dual["tokens_per_second"] *= 2
    report["cells"].remove(none)
    report["machine"]["threads"] = 99
    other = tmp_path / "other.json"
    other.write_text(json.dumps(report))
    assert main(["bench", "--compare", str(output), str(other)]) == 0
    compared = capsys.readouterr().out
    assert f"Note: threads was {json.loads(output.read_text())['machine']['threads']}, then 99." in compared
    assert "Note: 1 rows are in one of the files alone." in compared
    ratios = [line.split() for line in compared.splitlines() if line.startswith(("none ", "dual "))]
    assert [row[:5] for row in ratios if row[4] != "1.00"] == [["dual", "one", "1", "32", "2.00"]]
    other.write_text('{"settings": {}, "scores": []}')
    assert main(["bench", "--compare", str(other), str(other)]) == 2


def test_a_guide_is_measured_beside_one_token_a_step(measured):
    one, guided, *_ = measured("--methods", "none,dual", "--guide-model", "demo", "--guide-top-k", "2")[0]
    assert (one.unmasking, guided.unmasking) == ("one", "guided=demo")
    assert (one.is_guided, guided.engine["guide_model"], guided.decoding["guide_top_k"]) == (False, "demo", 2)


def test_arguments_go_before_the_preset_and_the_defaults(measured):
    combinations, quick = measured("--quick", "--batch", "2", "--methods", "none")
    assert (quick.batches, quick.prompts) == ([2], [64])
    assert [combination.unmasking for combination in combinations] == ["one", "threshold=0.9"]
    assert [c.unmasking for c in measured("--methods", "none", "--threshold", "0.5")[0]] == ["threshold=0.5"]
    combinations, workload = measured()
    assert (workload.batches, workload.prompts, workload.repeats) == ([1, 8], [128, 512], 3)
    assert [combination.method for combination in combinations] == list(FULL_METHODS)
    assert combinations[0].decoding["gen_length"] == 64
    # vLLM's names, and a block diffusion model whose last block goes on behind the response.
    asked = ["--model", "llada2-mini/16", "--batch-size", "2", "--input_len", "60", "--output-len", "20"]
    combinations, workload = measured(*asked)
    assert [combination.method for combination in combinations] == ["none", "block"]
    assert combinations[0].engine["max_model_len"] == 96
    assert (workload.batches, workload.prompts) == ([2], [60])


def test_policies_and_rules_say_how_to_unmask(measured):
    asked = "topk_margin,steps=8,threshold=0.9+block-add-threshold=0.2"
    combinations, _ = measured("--methods", "none", "--unmasking", asked)
    options = [{k: v for k, v in c.decoding.items() if k not in ("gen_length", "seed")} for c in combinations]
    assert options == [{"unmasking": "topk_margin"}, {"steps": 8}, {"threshold": 0.9, "block_add_threshold": 0.2}]


def test_random_weights_have_no_guide(capsys):
    assert main(["bench", "--model", "llada-8b/8", "--guide-model", "demo"]) == 2
    assert "'llada-8b/8' has random weights" in capsys.readouterr().err


def test_prompts_have_the_length_that_is_asked_for(engines, tiny_llada):
    llm = bench.load({"cache_method": "none"})
    tokenizer = llm.get_tokenizer()
    for length in (30, 100):
        prompts = [prompt for prompt, _ in Workload((3,), (length,), 1, 0).requests(llm, length, 3, {})]
        assert [len(prompt) for prompt in prompts] == [length] * 3
        text = tokenizer.decode(prompts[0])
        assert text.startswith("User:")
        assert text.endswith("Bot:")
        assert "Give:" in text
    with pytest.raises(ValueError, match="too short for a question"):
        Workload((1,), (8,), 1, 0).requests(llm, 8, 1, {})
    # Random weights get random tokens.
    (first, params), (second, _) = Workload((2,), (60,), 1, 0).requests(engines(tiny_llada), 60, 2, {})
    assert (len(first), len(second), params.ignore_eos) == (60, 60, True)
    assert first != second
