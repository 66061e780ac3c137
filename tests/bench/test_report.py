"""Tables and comparisons of result files."""

import copy

import pytest

from dllm_engine.bench.report import COLUMNS, comparison, over_plain, seconds_text, tables


def cell(method, batch=1, tokens_per_second=10.0, group=0, **changed):
    times = {"median": 0.25, "p90": 1.5, "p99": 1.6, "of": 2}
    step = {"steps": 9, "median_seconds": 0.02, "floor_seconds": 0.01, "time_over_floor": 2.0}
    return {
        "method": method,
        "unmasking": "one",
        "batch": batch,
        "prompt": 64,
        "group": group,
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_lowest": 0.9 * tokens_per_second,
        "tokens_per_second_highest": 1.2 * tokens_per_second,
        "first_block": times,
        "latency": times,
        "forward_passes": 32.0,
        "tokens_per_forward": 1.0,
        "rows_per_token": 96.0,
        "weight_bytes": 4 << 20,
        "page_bytes": 1 << 20,
        "working_bytes": 1 << 19,
        "repetition": None,
        "whole": None if method == "plain" else step,
        "reuse": None,
    } | changed


@pytest.fixture
def report():
    return {
        "machine": {"processor": "A CPU", "threads": 1, "torch": "2.13", "vllm": "0.32.0"}
        | {"clock": "wall", "date": "2026-01-01"},
        "runs": [
            {
                "model": "llada-8b/4",
                "weights": "random",
                "shape": {"hidden_size": 1024, "num_layers": 8},
                "dtype": "float32",
                "engine_args": {},
                "cache_options": {"none": {}, "dual": {}},
                "response": 32,
                "block_length": 32,
                "repeats": 3,
                "seed": 0,
                "rates": {"product_flops_per_second": 1.5e11, "copy_bytes_per_second": 1.2e10},
                "cells": [cell("plain"), cell("none", tokens_per_second=15.0), cell("dual", tokens_per_second=40.0)],
            }
        ],
    }


def test_a_table_has_a_row_per_cell_and_explains_its_columns(report):
    machine, about, table, *_, legend = tables(report).split("\n\n")
    assert machine == "A CPU, 1 threads, torch 2.13, vLLM 0.32.0, wall clock, 2026-01-01"
    assert about.startswith("llada-8b/4 (random weights, d=1024, 8 layers, float32): response 32, blocks of 32")
    assert "150 GFLOP/s, copies 12.0 GB/s" in about
    header, *rows = table.splitlines()
    split = [header.index(column) for column in COLUMNS]
    cells = [
        dict(zip(COLUMNS, (row[a:b].strip() for a, b in zip(split, [*split[1:], None], strict=True)), strict=True))
        for row in rows
    ]
    assert [row["METHOD"] for row in cells] == ["plain", "none", "dual"]
    assert [row["× PLAIN"] for row in cells] == ["–", "1.50", "4.00"]
    assert " ".join(cells[2]) == (
        "METHOD UNMASKING BATCH PROMPT TOKENS/S × PLAIN 1ST BLOCK LATENCY PASSES TOK/PASS ROWS/TOK MEMORY PAGES FULL÷ "
        "REUSE÷ REPEAT"
    )
    assert "  ".join(cells[2].values()) == (
        "dual  one  1  64  40.0 (36–48)  4.00  250 ms  250 ms, 1.50 s  32  1.00  96  5.5  1.0  2.00  –  –"
    )
    for column in COLUMNS[4:]:
        assert column in legend


def test_a_cell_is_held_against_the_baseline_of_its_group(report):
    (run,) = report["runs"]
    run["cells"] += [cell("plain", group=1, tokens_per_second=5.0), cell("sparse", group=1, tokens_per_second=10.0)]
    assert over_plain(run, run["cells"][-1]) == 2.0
    assert over_plain(run, cell("sparse", group=2)) is None


def test_a_comparison_is_of_common_cells_with_their_ratios(report):
    after = copy.deepcopy(report)
    (run,) = after["runs"]
    run["cells"][1]["tokens_per_second"] = 30.0
    run["cells"][1]["whole"]["time_over_floor"] = 1.5
    run["cells"][2] = cell("sparse")
    text = comparison(report, after, ("a.json", "b.json"))
    assert text.startswith("b.json over a.json")
    assert "Note: only in a.json: llada-8b/4 dual one 1 64." in text
    assert "Note: only in b.json: llada-8b/4 sparse one 1 64." in text
    header, *rows = text.split("\n\n")[-1].splitlines()
    values = {row.split()[1]: dict(zip(header.split()[5:], row.split()[5:], strict=False)) for row in rows}
    assert set(values) == {"plain", "none"}
    assert values["none"]["TOKENS/S"] == "2.00"
    assert rows[1].split()[-3:] == ["0.75", "–", "–"]
    assert rows[0].split()[-3:] == ["–", "–", "–"]


def test_a_comparison_names_what_else_differs(report):
    after = copy.deepcopy(report)
    after["machine"]["threads"] = 4
    after["runs"][0]["dtype"] = "bfloat16"
    after["runs"][0]["engine_args"] = {"cuda_graphs": True}
    after["runs"][0]["cache_options"] = {"dual": {"a": 1}, "sparse": {}}
    text = comparison(report, after, ("a", "b"))
    assert "Note: threads was 1, then 4: times do not compare." in text
    assert "Note: llada-8b/4: dtype was float32, then bfloat16." in text
    assert "Note: llada-8b/4: engine_args was {}, then {'cuda_graphs': True}." in text
    assert "Note: llada-8b/4: cache_options of dual were {}, then {'a': 1}." in text
    assert text.count("cache_options") == 1  # what only one of them measured is no difference
    assert "Note:" not in comparison(report, report, ("a", "a"))


def test_results_without_a_common_cell_say_so(report):
    after = copy.deepcopy(report)
    after["runs"][0]["model"] = "demo"
    assert comparison(report, after, ("a", "b")).endswith("The two have no cell in common.")


def test_seconds_are_readable():
    assert [seconds_text(s) for s in (0.0124, 0.99, 1.0, 12.345)] == ["12 ms", "990 ms", "1.00 s", "12.35 s"]


def test_a_plot_is_drawn_per_model(report, tmp_path):
    pytest.importorskip("matplotlib")
    from dllm_engine.bench.plots import draw

    report["runs"].append(copy.deepcopy(report["runs"][0]) | {"model": "demo"})
    files = draw(report, tmp_path / "plots")
    assert [file.name for file in files] == ["bench-llada-8b-4.png", "bench-demo.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
