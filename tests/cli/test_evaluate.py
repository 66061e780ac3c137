"""``dllm eval``: rows of cache methods, unmasking rules and tasks, their files, and how
a run goes on.
"""

import json

from dllm_engine.cli import evaluate
from dllm_engine.cli.arguments import parse_method, parse_rule, split_names
from dllm_engine.cli.main import main
from dllm_engine.evaluation.comparison import COLUMNS, Comparison


def rows_of(capsys):
    header, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert header.split() == list(COLUMNS)
    return [dict(zip(COLUMNS, row.split(), strict=True)) for row in rows]


def test_methods_and_rules_become_rows_files_and_a_plot(started, tmp_path, capsys):
    output = tmp_path / "table.json"
    rules = "one,steps=8,threshold=0.9,entropy-bound=0.1"
    arguments = [
        "--tasks",
        "chat,copy",
        "--count",
        "3",
        "--methods",
        "none,dual",
        "--unmasking-rules",
        rules,
    ]
    assert main(["eval", *arguments, "--output", str(output)]) == 0
    rows = rows_of(capsys)
    names = [
        (m, r, t)
        for m in ("none", "dual")
        for r in rules.split(",")
        for t in ("chat", "copy")
    ]
    assert [(row["METHOD"], row["UNMASKING"], row["TASK"]) for row in rows] == names
    assert {(row["METRIC"], row["EXAMPLES"]) for row in rows} == {("exact", "3")}
    per_pass = [float(row["TOKENS/PASS"]) for row in rows]
    assert per_pass[:4] == [1.0, 1.0, 4.0, 4.0]
    assert min(per_pass[4:8]) > 1.0
    assert {row["MEMORY"] for row in rows} == {"–"}, "without a GPU"
    assert [arguments["cache_method"] for arguments in started] == ["none", "dual"]

    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    report = json.loads(output.read_text())
    assert report["subject"]["count"] == 3
    assert report["rows"][0]["decoding"]["gen_length"] == 32
    assert report["machine"]["threads"] >= 1


def test_an_interrupted_run_goes_on_where_it_stopped(
    started, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "table.json"
    arguments = (
        f"eval --tasks copy --count 5 --methods none,dual --output {output}"
    ).split()
    measure = Comparison._measure

    def interrupted(comparison, row):
        if row.key == "dual one copy":
            raise KeyboardInterrupt
        measure(comparison, row)

    monkeypatch.setattr(Comparison, "_measure", interrupted)
    assert main(arguments) == 130
    assert "the same command goes on from there" in capsys.readouterr().out
    (finished,) = json.loads(output.read_text())["rows"]
    assert (finished["method"], finished["task"], finished["cost"]["requests"]) == (
        "none",
        "copy",
        5,
    )

    monkeypatch.setattr(Comparison, "_measure", measure)
    started.clear()
    assert main(arguments) == 0
    assert [row["METHOD"] for row in rows_of(capsys)] == ["none", "dual"]
    assert [arguments["cache_method"] for arguments in started] == ["dual"]

    # All is there: another method starts its own engine alone, and the table grows.
    started.clear()
    arguments[arguments.index("none,dual")] = "sparse"
    assert main(arguments) == 0
    assert [row["METHOD"] for row in rows_of(capsys)] == ["sparse", "none", "dual"]
    assert [arguments["cache_method"] for arguments in started] == ["sparse"]
    arguments[arguments.index("5")] = "4"
    assert main(arguments) == 2
    assert "has results with count=5, this run has 4" in capsys.readouterr().err


def test_methods_have_options_and_rules_have_guides():
    assert parse_method("sparse:retention_ratio=0.25:0.5+pool_kernel_size=1") == [
        ("sparse", {"retention_ratio": 0.25, "pool_kernel_size": 1}),
        ("sparse", {"retention_ratio": 0.5, "pool_kernel_size": 1}),
    ]
    texts = ["dual", "es_dllm:keep_schedule=[[1,0],[0.5,0.25]]", "none"]
    assert split_names(",".join(texts)) == texts
    assert parse_rule("one+certainty-sigma=10") == (None, {"certainty_sigma": 10})
    assert parse_rule("topk_margin+tokens_per_step=2") == (
        None,
        {"unmasking": "topk_margin", "tokens_per_step": 2},
    )


def test_a_table_without_a_row_is_an_error(started, capsys):
    assert main("eval --tasks chat --count 1 --unmasking-rules steps=99".split()) == 2
    assert "steps=99 is out of range" in capsys.readouterr().err


def test_an_engine_that_does_not_start_is_tried_once_and_leaves_the_others(
    started, demo, monkeypatch, capsys
):
    tried = []

    def load(arguments):
        tried.append(arguments["cache_method"])
        if tried[-1] == "dual":
            raise ValueError("out of luck")
        return demo

    monkeypatch.setattr(evaluate, "load", load)
    asked = (
        "--tasks chat --count 1 --unmasking-rules one,steps=16 "
        "--methods sparse,dual,none"
    ).split()
    assert main(["eval", *asked]) == 1
    assert tried == ["sparse", "dual", "none"]
    printed = capsys.readouterr()
    measured = [row.split()[:2] for row in printed.out.splitlines()[1:]]
    assert measured == [
        [method, rule] for method in ("sparse", "none") for rule in ("one", "steps=16")
    ]
    assert printed.err.count("out of luck") == 2


def test_tasks_of_ones_own_are_matched_as_asked(started, tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"prompt": "Copy: Rome Ida", "answer": "Ida", "x": 1}\n{"prompt": "Copy: Rome '
        'Tom", "answer": "Rome Tom"}\n'
    )
    asked = f"eval --tasks {file} --gen-length 16".split()
    assert main(asked) == 0
    assert (row := rows_of(capsys)[0])["TASK"] == "mine"
    assert (row["METRIC"], row["SCORE"], row["±"]) == ("exact", "0.5000", "0.3536")
    assert (
        main([*asked, "--match", "contains", "--output", str(tmp_path / "r.json")]) == 0
    )
    assert rows_of(capsys)[0]["SCORE"] == "1.0000"
    file.write_text('{"prompt": "Copy: Rome Ida", "answer": "Tom"}\n')
    assert (
        main([*asked, "--match", "contains", "--output", str(tmp_path / "r.json")]) == 2
    )
    assert f"has results of another {file}" in capsys.readouterr().err
    (other := tmp_path / "names.jsonl").write_bytes(file.read_bytes())
    assert main(f"eval --tasks names,{other}".split()) == 2
    assert "two tasks have the name 'names'" in capsys.readouterr().err


def test_an_engine_that_fails_is_replaced_for_the_rows_behind(
    started, demo, monkeypatch, capsys
):
    step = demo.llm_engine.step
    failures = [RuntimeError("out of memory")]
    monkeypatch.setattr(
        demo.llm_engine,
        "step",
        lambda: step() if not failures else (_ for _ in ()).throw(failures.pop()),
    )
    assert main("eval --tasks chat,copy --count 1".split()) == 1
    assert "cannot be measured: none one chat: out of memory" in capsys.readouterr().err
    assert len(started) == 2
