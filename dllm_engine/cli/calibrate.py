"""Fit a model's probabilities to labelled questions.

Asks each question, with its options in several orders and also without the input. Fits
a temperature for each kind (yes or no, choice, score) on one half of them, takes the
mean over orders and divides by what is answered without input where that helps, and
prints scores of the other half before and after, by kind. Run again, the same command goes on
where it stopped.
"""

import argparse
from pathlib import Path

from dllm_engine.cli.arguments import add_options, add_value, positive_int
from dllm_engine.cli.engine import (
    add_cache_arguments,
    add_engine_arguments,
    add_model,
    load,
    prepare,
)
from dllm_engine.options import EngineOptions
from dllm_engine.text import format_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    lines = (
        'a .jsonl file with lines {"input": "…", "question": {…}, "answer": …}, with '
        "input and question as in /v1/decisions"
    )
    add_value(parser, "--questions", Path, "FILE.jsonl", lines)
    add_value(
        parser,
        "--output",
        Path,
        "FILE.json",
        "the calibration, with a plot and the answers beside it",
        default=Path("calibration.json"),
    )
    add_value(parser, "--count", positive_int, "N", "questions (default: all)")
    add_value(parser, "--seed", int, "N", "which half is held back", default=0)
    add_options(parser, EngineOptions, ("decision_way", "decision_template"))
    add_cache_arguments(parser)
    add_engine_arguments(parser, with_model=False)


def run(args: argparse.Namespace) -> int:
    if args.questions is None:
        raise ValueError("nothing says what to ask; give --questions FILE.jsonl")
    arguments = prepare(args)
    from dllm_engine.evaluation.calibrating import ALL, fit, measure
    from dllm_engine.evaluation.comparison import check_output
    from dllm_engine.evaluation.labelled_questions import read_labelled
    from dllm_engine.evaluation.plots import draw_curves, plot_beside

    check_output(args.output)
    plot = plot_beside(args.output)
    questions = read_labelled(args.questions)[: args.count]
    llm = load(arguments)
    answers = args.output.with_suffix(".answers.json")
    measured = measure(llm.asking, llm.ask_rows, questions, answers)
    fitted = fit(questions, measured, args.seed)
    fitted.calibration.write(args.output)
    rows = []
    for kind, before in fitted.before.items():
        for name, judged in (("no", before), ("yes", fitted.after[kind])):
            scores, flips = judged
            error = scores.calibration_error
            figures = (scores.accuracy, error, scores.brier, scores.log_loss, flips)
            shown = ("–" if figure is None else f"{figure:.3f}" for figure in figures)
            rows.append((kind, str(len(scores.right)), name, *shown))
    scored = ("ACCURACY", "CALIBRATION ERROR", "BRIER", "LOG LOSS", "FLIPS")
    print(format_table([("KIND", "HELD BACK", "CORRECTED", *scored), *rows]))
    print("\nFLIPS: choices that change with the order of the labels.")
    for kind, correction in fitted.calibration.corrections.items():
        steps = [f"temperature {correction.temperature:.2f}"]
        if correction.orders > 1:
            steps.append(f"mean over {correction.orders} orders")
        if correction.has_prior:
            steps.append("divided by the answers without input")
        print(f"{kind}: {', '.join(steps)}")
    if not fitted.calibration.corrections:
        print("No correction makes the held-back questions more probable.")
    print(f"wrote {args.output}: dllm serve … --decision-calibration {args.output}")
    if plot is not None:
        curves = {
            f"{name} (error {scores.calibration_error:.3f})": scores.bins
            for name, (scores, _) in (
                ("before", fitted.before[ALL]),
                ("after", fitted.after[ALL]),
            )
        }
        draw_curves(curves, plot)
    return 0
