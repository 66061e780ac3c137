"""``dllm eval`` scores responses and writes them as a table and as JSON."""

import json
from types import SimpleNamespace

import pytest

from dllm_engine.cli import evaluate
from dllm_engine.cli.engine import DEMO_LENGTHS
from dllm_engine.cli.main import main
from dllm_engine.demo.tasks import Example
from dllm_engine.figures import DiffusionFigures

EXAMPLES = [
    Example("names", "Tom=48. Ida=07. Give: Ida, Tom", "Ida=07, Tom=48", ("Ida=07", "Tom=48")),
    Example("names", "Tom=48. Give: Tom", "Tom=48", ("Tom=48",)),
]


def output(text, prompt_length, forward_passes):
    figures = DiffusionFigures(forward_passes, forward_passes, tokens_unmasked=8, tokens_computed=0)
    completion = SimpleNamespace(text=text, diffusion=figures)
    return SimpleNamespace(prompt_token_ids=[0] * prompt_length, outputs=[completion])


def test_scores_count_whole_answers_items_and_passes():
    score = evaluate.score(EXAMPLES, [output(" Ida=07, Tom=49", 20, 8), output(" Tom=48", 12, 4)], seconds=2.0)
    assert (score.task, score.examples, score.seconds) == ("names", 2, 2.0)
    assert (score.min_prompt_tokens, score.max_prompt_tokens) == (12, 20)
    assert score.exact_match == 0.5
    assert score.item_match == pytest.approx(2 / 3)
    assert score.forwards_per_token == 12 / 16
    assert score.row() == ("names", "12-20", "2", "50.0%", "66.7%", "0.75", "2.0")


def test_the_command_prints_a_table_and_writes_json(demo, monkeypatch, tmp_path, capsys):
    from dllm_engine import DiffusionParams

    monkeypatch.setattr(evaluate, "start_engine", lambda args: (demo, DiffusionParams(**DEMO_LENGTHS)))
    report = tmp_path / "report.json"
    assert main(["eval", "--tasks", "chat,names", "--count", "3", "--json", str(report)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["TASK", "PROMPT", "TOKENS", "EXAMPLES", "EXACT", "ITEMS", "FORWARDS/TOKEN", "SECONDS"]
    assert [row.split()[0] for row in rows] == ["chat", "names"]
    written = json.loads(report.read_text())
    assert [score["examples"] for score in written["scores"]] == [3, 3]
    assert written["settings"]["count"] == 3
    assert written["settings"]["gen_length"] == 32
