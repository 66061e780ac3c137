"""``dllm eval`` scores responses and writes them as a table and as JSON."""

import json
from types import SimpleNamespace

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.cli import evaluate
from dllm_engine.cli.main import build_parser, main
from dllm_engine.demo.tasks import Example
from dllm_engine.evaluation import comparison
from dllm_engine.evaluation import score as task_score
from dllm_engine.figures import DiffusionFigures
from dllm_engine.scheduler.methods import CACHE_METHODS


@pytest.fixture(autouse=True)
def engines_of_a_comparison_go_on(monkeypatch):
    """They are those of other tests."""
    monkeypatch.setattr(comparison, "_stop", lambda llm: None)


EXAMPLES = [
    Example("names", "Tom=48. Ida=07. Give: Ida, Tom", "Ida=07, Tom=48", ("Ida=07", "Tom=48")),
    Example("names", "Tom=48. Give: Tom", "Tom=48", ("Tom=48",)),
]


def output(text, prompt_length, forward_passes):
    figures = DiffusionFigures(forward_passes, forward_passes, tokens_unmasked=8, tokens_computed=40)
    completion = SimpleNamespace(text=text, diffusion=figures)
    return SimpleNamespace(prompt_token_ids=[0] * prompt_length, outputs=[completion])


def test_scores_count_whole_answers_items_and_passes():
    score = task_score.score(EXAMPLES, [output(" Ida=07, Tom=49", 20, 8), output(" Tom=48", 12, 4)], seconds=2.0)
    assert (score.task, score.examples, score.seconds) == ("names", 2, 2.0)
    assert (score.min_prompt_tokens, score.max_prompt_tokens) == (12, 20)
    assert score.exact_match == 0.5
    assert score.item_match == pytest.approx(2 / 3)
    assert score.tokens == 16
    assert score.forwards_per_token == 12 / 16
    assert score.computed_per_token == 80 / 16
    assert score.row() == ("names", "12-20", "2", "50.0%", "66.7%", "0.75", "2.0")


def test_the_command_prints_a_table_and_writes_json(demo, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(evaluate, "start_engine", lambda args: (demo, DiffusionParams()))
    report = tmp_path / "report.json"
    assert main(["eval", "--tasks", "chat,names", "--count", "3", "--json", str(report)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["TASK", "PROMPT", "TOKENS", "EXAMPLES", "EXACT", "ITEMS", "FORWARDS/TOKEN", "SECONDS"]
    assert [row.split()[0] for row in rows] == ["chat", "names"]
    written = json.loads(report.read_text())
    assert [score["examples"] for score in written["scores"]] == [3, 3]
    assert written["settings"]["count"] == 3
    assert written["settings"]["gen_length"] == 32


def test_scores_of_a_combination_weigh_examples_and_tokens():
    def of_task(examples, exact_match, tokens, forwards_per_token, seconds):
        return task_score.TaskScore(
            "names", 10, 20, examples, exact_match, exact_match, tokens, forwards_per_token, 10.0, seconds
        )

    combination = comparison.Combination("dual", "one", engine={}, decoding={})
    score = comparison.ComparedScore.of(combination, [of_task(3, 1.0, 30, 1.0, 2.0), of_task(1, 0.0, 10, 0.2, 2.0)])
    assert score.row() == ("dual", "one", "75.0%", "0.0%", "75.0%", "8.00", "1.25", "10.0", "10")
    # Within a task: 9 and 16 examples of which a half and a fifth are right, the root of (9/4 + 16 · 4/25) / 25².
    score = comparison.ComparedScore.of(combination, [of_task(9, 0.5, 9, 1.0, 1.0), of_task(16, 0.2, 16, 1.0, 1.0)])
    assert score.exact_match_error == pytest.approx((2.25 + 2.56) ** 0.5 / 25)


def test_methods_and_rules_are_compared_in_one_run(demo, monkeypatch, tmp_path, capsys):
    started = []

    def load(arguments):
        started.append(arguments["cache_method"])
        return demo

    monkeypatch.setattr(evaluate, "load", load)
    report = tmp_path / "report.json"
    arguments = ["--tasks", "chat,copy", "--count", "3", "--json", str(report)]
    rules = "one,steps=8,threshold=0.9,entropy-bound=0.1"
    assert main(["eval", *arguments, "--methods", "none,dual", "--unmasking-rules", rules]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == list(comparison.COLUMNS)
    assert [tuple(row.split()[:2]) for row in rows] == [(m, r) for m in ("none", "dual") for r in rules.split(",")]
    assert started == ["none", "dual"]
    per_forward = [float(row.split()[6]) for row in rows[:4]]
    assert per_forward[:2] == [1.0, 4.0]
    assert min(per_forward[2:]) > 1.0
    written = json.loads(report.read_text())
    assert [score["unmasking"] for score in written["scores"]] == rules.split(",") * 2
    assert [task["task"] for task in written["scores"][0]["tasks"]] == ["chat", "copy"]


def test_what_is_left_out_of_a_comparison_is_the_commands_own(demo, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "load", lambda arguments: demo)
    assert main(["eval", "--tasks", "chat", "--count", "1", "--methods", "none", "--threshold", "0.9"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["none", "threshold=0.9"]
    assert main(["eval", "--tasks", "chat", "--count", "1", "--cache-method", "dual", "--unmasking-rules", "one"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["dual", "one"]


def test_a_guide_is_a_way_of_unmasking_beside_the_rules():
    def asked(*arguments):
        made = evaluate.combinations(build_parser().parse_args(["eval", *arguments]))
        return {combination.rule: combination.decoding for combination in made}

    guide = ["--guide-model", "demo", "--guide-top-k", "2", "--guide-threshold", "0.5"]
    guiding = {"seed": 0, "guide_top_k": 2, "guide_threshold": 0.5}
    assert asked(*guide) == {"guided": guiding}
    assert asked(*guide, "--unmasking-rules", "one,guided,threshold=0.9") == {
        "one": {"seed": 0, "guided": False},
        "guided": guiding | {"guided": True},
        "threshold=0.9": {"seed": 0, "guided": False, "threshold": 0.9},
    }
    assert asked("--guide-model", "demo", "--no-guided") == {"one": {"seed": 0, "guided": False}}
    with pytest.raises(ValueError, match="'guided': there is no guide; give --guide-model"):
        asked("--unmasking-rules", "one,guided")


def test_all_stands_for_every_cache_method():
    asked = evaluate.combinations(build_parser().parse_args(["eval", "--methods", "all"]))
    assert [combination.cache_method for combination in asked] == list(CACHE_METHODS)


def test_a_comparison_that_fails_late_shows_what_it_found(demo, monkeypatch, capsys):
    def load(arguments):
        if arguments["cache_method"] == "dual":
            raise OSError("out of luck")
        return demo

    monkeypatch.setattr(evaluate, "load", load)
    assert main(["eval", "--tasks", "chat", "--count", "1", "--methods", "none,dual"]) != 0
    printed = capsys.readouterr()
    assert [row.split()[0] for row in printed.out.splitlines()] == ["METHOD", "none"]
    assert "out of luck" in printed.err
