"""``dllm eval`` on tasks of lm_eval: scores, comparison, plot, and what is missing."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from dllm_engine.cli import evaluate
from dllm_engine.cli.commands import build_parser
from dllm_engine.cli.main import main
from dllm_engine.evaluation import harness
from tests.cli.test_evaluate import rows_of
from tests.support.checkout import CHECKOUT

NAMES = "examples/lm_eval/names.yaml"
FACTS = "examples/lm_eval/facts.yaml"
QUICK = "--count 3 --mc-num 4".split()


@pytest.fixture(autouse=True)
def checkout(monkeypatch):
    monkeypatch.chdir(CHECKOUT)


def test_a_row_per_task_with_its_cost(started, tmp_path, capsys):
    output = tmp_path / "table.json"
    rules = ["--unmasking-rules", "one,steps=8"]
    assert (
        main(
            [
                "eval",
                "--lm-eval",
                f"{NAMES},{FACTS}",
                *QUICK,
                *rules,
                "--output",
                str(output),
            ]
        )
        == 0
    )
    names, facts, fewer, _ = ([*row.values()] for row in rows_of(capsys))
    assert names[:7] == [
        "none",
        "one",
        "names",
        "exact_match,stripped",
        "1.0000",
        "0.0000",
        "3",
    ]
    assert facts[:5] == ["none", "one", "facts", "acc,none", "1.0000"]
    assert facts[6:] == ["3", *["–"] * 6]  # no response was asked for
    assert (names[8], fewer[8]) == ("1.00", "4.00")
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    first = json.loads(output.read_text())["rows"][0]
    assert first["decoding"] == {"seed": 0}
    assert first["result"]["details"]["num_fewshot"] == {"names": 0}
    assert first["result"]["details"]["names"]["exact_match,stripped"] == 1.0
    assert len(started) == 1


def test_missing_data_are_named_before_an_engine_starts(
    started, tmp_path, monkeypatch, capsys
):
    task = tmp_path / "lost.yaml"
    text = (
        Path(NAMES)
        .read_text(encoding="utf-8")
        .replace("examples/lm_eval/names.jsonl", f"{tmp_path}/lost.jsonl")
    )
    task.write_text(text, encoding="utf-8")
    assert main(f"eval --lm-eval {task}".split()) == 2
    assert "Its data must be at hand" in capsys.readouterr().err
    for setting in (
        "huggingface_hub.constants.HF_HUB_OFFLINE",
        "datasets.config.HF_HUB_OFFLINE",
    ):
        monkeypatch.setattr(setting, True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    assert main("eval --paper-task gsm8k".split()) == 2
    (message,) = (
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("dllm: error: ")
    )
    assert "task 'gsm8k' cannot be loaded" in message
    assert "openai/gsm8k" in message
    assert "HF_HOME" in message
    assert not started


def test_a_missing_harness_is_named(started, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    for command in (["eval", "--lm-eval", NAMES], ["lm-eval", "ls", "tasks"]):
        assert main(command) == 2
        assert "pip install '.[eval]' in a checkout" in capsys.readouterr().err


def parsed(*arguments):
    return build_parser().parse_args(["eval", *arguments])


def test_paper_tasks_bring_lengths_shots_and_intervals_which_give_way_to_the_commands_own():
    args = parsed(
        "--model",
        "GSAI-ML/LLaDA-8B-Instruct",
        "--paper-task",
        "gsm8k,mbpp",
        "--paper",
        "dllm-cache",
    )
    tasks: list[Any] = evaluate.tasks_of(args)
    gsm8k, mbpp = tasks
    assert (gsm8k.name, gsm8k.num_fewshot, gsm8k.with_chat_template) == (
        "gsm8k",
        4,
        True,
    )
    assert gsm8k.decoding == {"gen_length": 256, "block_length": 8, "steps": 256}
    assert mbpp.cache_options["dllm_cache"]["prompt_refresh_interval"] == 100

    args.paper_task, args.num_fewshot = "gsm8k", 2
    tasks = evaluate.tasks_of(args)
    assert [cast(Any, task).num_fewshot for task in tasks] == [2]
    args.methods = "none,dllm_cache,dllm_cache:response_refresh_interval=2"
    none, cached, own = map(gsm8k.engine_of, evaluate.combinations(args, None))
    assert none["cache_options"] == {}
    assert cached["cache_options"] == {
        "prompt_refresh_interval": 50,
        "response_refresh_interval": 7,
    }
    assert own["cache_options"] == {
        "prompt_refresh_interval": 50,
        "response_refresh_interval": 2,
    }


def test_a_paper_has_other_lengths_with_a_guide():
    args = parsed(
        "--model",
        "Dream-org/Dream-v0-Instruct-7B",
        "--paper-table",
        "freecache/table-7",
    )
    args.paper, args.paper_task = "freecache", "hellaswag"
    args.methods = "freecache"
    args.unmasking_rules = "one,guided=demo+guide_top_k=1,tokens_per_step=2"
    tasks: list[Any] = evaluate.tasks_of(args)
    (task,) = tasks
    assert (Path(task.name).name, task.num_fewshot) == ("hellaswag_chat.yaml", 5)
    one, guided, counted = map(task.decoding_of, evaluate.combinations(args, None))
    seed = {"seed": 0}
    assert one == {"gen_length": 256, "block_length": 256, "steps": 256} | seed
    guide = {"speculation_length": 32, "guide_top_k": 1, "guide_threshold": 0.5}
    assert guided == {"gen_length": 1024, "block_length": 256} | guide | seed
    assert (
        counted == {"gen_length": 256, "block_length": 256, "tokens_per_step": 2} | seed
    )
    # Steps of a paper without a guide are not a guide's.
    args.paper, args.paper_task, args.methods = None, "gsm8k", "none"
    tasks = evaluate.tasks_of(args)
    (task,) = tasks
    one, guided, _ = map(task.decoding_of, evaluate.combinations(args, None))
    assert ("steps" in one, "steps" in guided) == (True, False)


def test_a_papers_table_sets_what_is_not_named(monkeypatch):
    args = parsed(
        "--paper-table",
        "sparse-dllm/table-3",
        "--methods",
        "none",
        "--model",
        "GSAI-ML/LLaDA-8B-Instruct",
    )
    monkeypatch.setattr(
        evaluate,
        "tasks_of",
        lambda args: pytest.fail(f"{args.methods} {args.paper_task}"),
    )
    with pytest.raises(pytest.fail.Exception, match="none arc_challenge"):
        evaluate.run(args)


def results(groups=None, **values):
    entries = {
        name: {"alias": name, "f1,none": f1, "f1_stderr,none": 0.1}
        for name, (f1, _) in values.items()
    }
    counts = {
        name: {"original": 100, "effective": count}
        for name, (_, count) in values.items()
    }
    return {
        "results": entries | (groups or {}),
        "groups": groups or {},
        "n-samples": counts,
    }


def test_the_headline_is_the_groups_own_or_the_mean_of_the_tasks():
    assert harness.headline(results(a=(0.5, 3)), "a.yaml", None) == (
        "f1,none",
        0.5,
        0.1,
    )
    assert harness.headline(results(a=(0.5, 3), b=(1.0, 1)), "tag", None) == (
        "f1,none",
        0.625,
        None,
    )
    group = {"g": {"f1,none": 0.7, "f1_stderr,none": "N/A"}}
    assert harness.headline(results(group, a=(0.5, 3), b=(1.0, 1)), "g", "f1,none") == (
        "f1,none",
        0.7,
        None,
    )
    with pytest.raises(ValueError, match="no metric 'acc,none'; choose one of f1,none"):
        harness.headline(results(a=(0.5, 3)), "a", "acc,none")
