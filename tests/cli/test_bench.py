"""``dllm bench`` measures what its arguments ask for and writes it down."""

import json

import pytest

from dllm_engine.bench import benchmark
from dllm_engine.bench.benchmark import Benchmark
from dllm_engine.bench.subject import Subject, Unmasking
from dllm_engine.cli import bench
from dllm_engine.cli.main import build_parser, main
from tests.support.plans import FULL_METHODS


def parsed(*arguments):
    return build_parser().parse_args(["bench", *arguments])


def settings_of(*arguments):
    return bench.settings(bench.filled(parsed(*arguments), {}))


@pytest.fixture
def shared_engines(engines, monkeypatch):
    """The benchmark's engines are those of the session: one that ends takes vLLM's process groups along."""

    def start(self, method):
        limits = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
        return engines(self.settings.model, cache_method=method, skip_tokenizer_init=False, trace=False, **limits)

    monkeypatch.setattr(Subject, "start", start)


def test_a_run_prints_a_table_and_writes_figures(shared_engines, tmp_path, capsys):
    output = tmp_path / "result.json"
    arguments = ["--methods", "none,dual", "--batch", "1,2", "--prompt", "32", "--response", "16", "--repeats", "1"]
    arguments += ["--unmasking", "one,threshold=0.9", "--dtype", "float32", "--max-model-len", "256"]
    assert main(["bench", *arguments, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split()[:4] for line in printed.splitlines() if line.startswith(("plain ", "none ", "dual "))]
    per_rule = [("plain", "1"), ("none", "1"), ("dual", "1"), ("none", "2"), ("dual", "2")]
    assert rows == [[method, rule, batch, "32"] for rule in ("one", "threshold=0.9") for method, batch in per_rule]
    assert f"wrote {output}" in printed

    report = json.loads(output.read_text())
    assert report["command"].startswith("dllm bench --methods none,dual --batch 1,2 --prompt 32")
    assert report["machine"]["threads"] >= 1
    (run,) = report["runs"]
    assert (run["weights"], run["dtype"], run["block_length"]) == ("checkpoint", "float32", 8)
    assert run["rates"]["copy_bytes_per_second"] > 0
    cells = {(cell["method"], cell["unmasking"], cell["batch"]): cell for cell in run["cells"]}
    plain, none, dual = (cells[method, "one", 1] for method in ("plain", "none", "dual"))
    # The baseline does what `none` does, and the demo model's answers end before the response does.
    for name in ("visible_tokens", "forward_passes", "rows_computed", "repetition"):
        assert plain[name] == none[name]
    assert 0 < none["visible_tokens"] < 16
    assert dual["rows_computed"] < none["rows_computed"]
    assert dual["page_bytes"] > none["page_bytes"] == 0
    assert none["whole"]["rows"] == 48
    assert dual["reuse"]["keys"] == 48
    assert cells["none", "threshold=0.9", 1]["forward_passes"] < none["forward_passes"]

    assert main(["bench", "--compare", str(output), str(output)]) == 0
    compared = capsys.readouterr().out
    assert "Note" not in compared
    assert compared.count(" 1.00 ") >= len(run["cells"])


def test_a_guide_is_measured_beside_one_token_a_step(monkeypatch):
    asked = ["--methods", "none,dual", "--guide-model", "demo", "--guide-top-k", "2"]
    made = Benchmark(settings_of(*asked))
    assert {u.text: u.options for u in made.settings.unmaskings} == {
        "one": {"guided": False},
        "guided": {"guided": True, "guide_top_k": 2},
    }
    alone = Benchmark(settings_of("--methods", "none,dual"))
    one, _ = made.settings.unmaskings
    # The plain model has no guide, and the guide's weights and pages count.
    assert {cell.unmasking for cell in made._cells(("dual",)) if cell.method == "plain"} == {one}
    assert made.subject.weight_bytes > alone.subject.weight_bytes
    assert made.subject.pool_bytes("dual") > alone.subject.pool_bytes("dual")
    for arguments, problem in (
        (["--guide-top-k", "2"], "--guide-top-k: there is no guide; give --guide-model"),
        (["--model", "llada-8b/8", "--guide-model", "demo"], "'llada-8b/8' has random weights"),
    ):
        with pytest.raises(ValueError, match=problem):
            Benchmark(settings_of(*arguments))


def test_methods_that_do_not_fit_side_by_side_are_measured_one_by_one(monkeypatch):
    made = Benchmark(settings_of("--model", "llada-8b/8", "--methods", "none,dual"))
    assert made.groups() == [("none", "dual")]
    monkeypatch.setattr(benchmark, "available", lambda: made.subject.weight_bytes)
    assert made.groups() == [("none",), ("dual",)]


def test_what_is_given_goes_before_the_preset_and_the_defaults():
    filled = [bench.filled(parsed("--quick", "--batch", "2", "--methods", "none"), preset) for preset in bench.QUICK]
    assert [each.model for each in filled] == ["demo", "llada-8b/16"]
    assert [each.batch for each in filled] == [[2], [2]]
    assert [each.prompt for each in filled] == [[64], [256]]
    assert bench.filled(parsed(), {}).batch == [1, 8]
    settings = bench.settings(filled[0])
    assert (settings.methods, settings.repeats) == (("none",), 3)
    assert [unmasking.options for unmasking in settings.unmaskings] == [{}, {"threshold": 0.9}]


def test_vllms_names_of_its_lengths_are_taken_and_all_methods_where_none_is_named():
    args = parsed("--batch-size", "2", "--input_len", "1k", "--output-len", "64")
    assert (args.batch, args.prompt, args.response) == ([2], [1000], 64)
    assert settings_of().methods == tuple(FULL_METHODS)
    assert settings_of("--model", "sdar-8b/16").methods == ("none", "block")


def test_prompts_of_a_batch_begin_alike():
    asked = ["--model", "llada2-mini/16", "--prompt", "60", "--response", "20", "--shared-prefix", "50"]
    subject = Benchmark(settings_of(*asked)).subject
    assert subject.max_model_len == 96, "its last block goes on behind the response"
    first, second, *_ = subject.prompts(60, None)
    assert first[:50] == second[:50]
    assert first[50:] != second[50:]
    with pytest.raises(ValueError, match="--shared-prefix 50: prompts of 'demo' are questions"):
        Benchmark(settings_of("--shared-prefix", "50"))


def test_policies_and_rules_say_how_to_unmask():
    rules = settings_of("--unmasking", "topk_margin,steps=8,threshold=0.9+block-add-threshold=0.2").unmaskings
    assert rules == (
        Unmasking("topk_margin", {"unmasking": "topk_margin"}),
        Unmasking("steps=8", {"steps": 8}),
        Unmasking("threshold=0.9+block-add-threshold=0.2", {"threshold": 0.9, "block_add_threshold": 0.2}),
    )


def test_another_file_is_no_result(tmp_path):
    file = tmp_path / "other.json"
    file.write_text('{"settings": {}, "scores": []}')
    assert main(["bench", "--compare", str(file), str(file)]) == 2


def test_prompts_have_the_length_that_is_asked_for(shared_engines, engines):
    asked = ["--prompt", "30,100", "--batch", "3", "--dtype", "float32"]
    subject = Benchmark(settings_of(*asked)).subject
    tokenizer = subject.start("none").get_tokenizer()
    for length in (30, 100):
        prompts = subject.prompts(length, tokenizer)
        assert [len(prompt) for prompt in prompts] == [length] * 3
        assert prompts == subject.prompts(length, tokenizer)
        text = tokenizer.decode(prompts[0])
        assert text.startswith("User:")
        assert text.endswith("Bot:")
        assert "Give:" in text
    with pytest.raises(ValueError, match="too short for a question"):
        subject.prompts(8, tokenizer)
