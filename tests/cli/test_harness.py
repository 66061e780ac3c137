"""``dllm eval`` on tasks of lm_eval: scores, comparison, plot, and what is missing."""

import json
from pathlib import Path

import pytest

from dllm_engine.cli import evaluate
from dllm_engine.cli.arguments import key_value
from dllm_engine.cli.main import build_parser, main
from dllm_engine.evaluation import comparison, harness

NAMES = "examples/lm_eval/names.yaml"
FACTS = "examples/lm_eval/facts.yaml"
QUICK = ["--count", "3", "--mc-num", "4"]


@pytest.fixture
def started(demo, monkeypatch):
    """Every engine is the demo's; holds the arguments that they were asked for with."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    settings = []

    def load(arguments):
        settings.append(arguments)
        return demo

    monkeypatch.setattr(evaluate, "load", load)
    monkeypatch.setattr(comparison, "_stop", lambda llm: None)
    # It runs pip, to list what is installed, after each evaluation.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    return settings


def rows_of(capsys):
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == list(harness.COLUMNS)
    return [row.split() for row in rows]


def test_a_row_per_task_with_its_cost(started, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main(["eval", "--lm-eval", f"{NAMES},{FACTS}", *QUICK, "--json", str(report)]) == 0
    names, facts = rows_of(capsys)
    assert names[:8] == ["none", "one", "names", "exact_match,stripped", "1.0000", "0.0000", "3", "1.00"]
    assert facts[:4] == ["none", "one", "facts", "acc,none"]
    assert facts[6:] == ["3", "-", "-", "-"]
    written = json.loads(report.read_text())
    assert written["settings"]["lm_eval"] == f"{NAMES},{FACTS}"
    assert written["scores"][0]["decoding"] == {"seed": 0}
    assert written["scores"][0]["num_fewshot"] == {"names": 0}
    assert written["scores"][0]["results"]["names"]["exact_match,stripped"] == 1.0
    assert len(started) == 1


def test_methods_and_rules_become_rows_and_a_plot(started, tmp_path, capsys):
    plot, report = tmp_path / "plot.png", tmp_path / "report.json"
    arguments = ["--methods", "none,dual", "--unmasking-rules", "one,steps=8", "--plot", str(plot)]
    assert main(["eval", "--lm-eval", NAMES, *QUICK, *arguments, "--json", str(report)]) == 0
    assert json.loads(report.read_text())["settings"]["plot"] == str(plot)
    rows = rows_of(capsys)
    assert [row[:2] for row in rows] == [[m, r] for m in ("none", "dual") for r in ("one", "steps=8")]
    assert [row[7] for row in rows] == ["1.00", "0.25"] * 2
    assert [arguments["cache_method"] for arguments in started] == ["none", "dual"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_demo_tasks_are_plotted_too(started, tmp_path):
    plot = tmp_path / "plot.png"
    assert main(["eval", "--tasks", "chat", "--count", "2", "--methods", "none,dual", "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_likelihoods_have_no_speed_to_plot(started, tmp_path, capsys):
    assert main(["eval", "--lm-eval", FACTS, *QUICK, "--plot", str(tmp_path / "plot.png")]) == 2
    assert "nothing to plot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--lm-eval", NAMES, "--plot", "plot.svg"], "plot.svg: the plot is a .png"),
        (["--lm-eval", NAMES, "--plot", "nowhere/plot.png"], "no folder nowhere"),
        (["--tasks", "chat", "--plot", "plot.png"], "--plot shows combinations"),
        (["--lm-eval", "nothing.yaml"], "knows no task 'nothing.yaml'"),
        (["--lm-eval", NAMES, *QUICK, "--metric", "bleu"], "no metric 'bleu'; choose one of exact_match,stripped"),
        (["--paper-task", "gsm8k", "--paper", "nobody"], "paper 'nobody' is unknown"),
    ],
)
def test_what_cannot_be_is_named(started, capsys, arguments, named):
    assert main(["eval", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_missing_data_are_named_before_an_engine_starts(started, tmp_path, monkeypatch, capsys):
    task = tmp_path / "lost.yaml"
    text = Path(NAMES).read_text(encoding="utf-8").replace("examples/lm_eval/names.jsonl", f"{tmp_path}/lost.jsonl")
    task.write_text(text, encoding="utf-8")
    assert main(["eval", "--lm-eval", str(task)]) == 2
    assert "Its data must be at hand" in capsys.readouterr().err
    for setting in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(setting, True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    assert main(["eval", "--paper-task", "gsm8k"]) == 2
    (message,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("dllm: error: "))
    assert "task 'gsm8k' cannot be loaded" in message
    assert "openai/gsm8k" in message
    assert "HF_HOME" in message
    assert not started


def test_a_missing_harness_is_named(started, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    for command in (["eval", "--lm-eval", NAMES], ["lm-eval", "ls", "tasks"]):
        assert main(command) == 2
        assert "pip install 'dllm-engine[eval]'" in capsys.readouterr().err


def parsed(*arguments):
    return build_parser().parse_args(["eval", *arguments])


def test_paper_tasks_bring_lengths_shots_and_intervals():
    args = parsed("--model", "GSAI-ML/LLaDA-8B-Instruct", "--paper-task", "gsm8k,mbpp", "--paper", "dllm-cache")
    gsm8k, mbpp = evaluate.harness_tasks(args)
    assert (gsm8k.name, gsm8k.num_fewshot, gsm8k.with_chat_template) == ("gsm8k", 4, True)
    assert gsm8k.decoding == {"gen_length": 256, "block_length": 8, "steps": 256}
    assert mbpp.cache_options["dllm_cache"]["prompt_refresh_interval"] == 100
    assert harness._with_equal_engines([gsm8k, mbpp]) == [[gsm8k], [mbpp]]
    assert harness._with_equal_engines([gsm8k, gsm8k]) == [[gsm8k, gsm8k]]


def test_a_papers_cache_options_are_for_its_method_and_give_way_to_the_commands_own():
    args = parsed("--model", "GSAI-ML/LLaDA-8B-Instruct", "--paper-task", "gsm8k", "--paper", "dllm-cache")
    (task,) = evaluate.harness_tasks(args)
    args.methods = "none,dllm_cache"
    none, cached = (harness._for_tasks(combination, task) for combination in evaluate.combinations(args))
    assert none.engine["cache_options"] == {}
    assert cached.engine["cache_options"] == {"prompt_refresh_interval": 50, "response_refresh_interval": 7}
    args.methods, args.cache_method, args.cache_option = None, "dllm_cache", [key_value("update_ratio=0.5")]
    (own,) = evaluate.combinations(args)
    assert harness._for_tasks(own, task) is own


def test_a_guide_has_no_use_for_a_papers_steps():
    args = parsed("--model", "GSAI-ML/LLaDA-8B-Instruct", "--paper-task", "gsm8k", "--guide-model", "demo")
    args.unmasking_rules = "one,guided"
    (task,) = evaluate.harness_tasks(args)
    one, guided = (harness.decoding_of(task, combination) for combination in evaluate.combinations(args))
    assert "steps" in one
    assert guided == {"gen_length": 256, "block_length": 32, "seed": 0, "guided": True}


def test_the_commands_own_settings_go_before_the_papers():
    args = parsed("--model", "Dream-org/Dream-v0-Base-7B", "--paper-task", "humaneval", "--num-fewshot", "2")
    (task,) = evaluate.harness_tasks(args)
    assert (task.name, task.num_fewshot, task.with_chat_template) == ("humaneval", 2, False)


def results(groups=None, **values):
    entries = {name: {"alias": name, "f1,none": f1, "f1_stderr,none": 0.1} for name, (f1, _) in values.items()}
    counts = {name: {"original": 100, "effective": count} for name, (_, count) in values.items()}
    return {"results": entries | (groups or {}), "groups": groups or {}, "n-samples": counts}


def test_the_headline_is_the_groups_own_or_the_mean_of_the_tasks():
    assert harness.headline(results(a=(0.5, 3)), "a.yaml", None) == ("f1,none", 0.5, 0.1)
    assert harness.headline(results(a=(0.5, 3), b=(1.0, 1)), "tag", None) == ("f1,none", 0.625, None)
    group = {"g": {"f1,none": 0.7, "f1_stderr,none": "N/A"}}
    assert harness.headline(results(group, a=(0.5, 3), b=(1.0, 1)), "g", "f1,none") == ("f1,none", 0.7, None)
    with pytest.raises(ValueError, match="no metric 'acc,none'; choose one of f1,none"):
        harness.headline(results(a=(0.5, 3)), "a", "acc,none")
