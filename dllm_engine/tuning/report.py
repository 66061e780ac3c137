"""What a search has found: a table, commands that use it, and a plot."""

import shlex
import statistics
from pathlib import Path
from typing import Any

from dllm_engine.cli.arguments import as_words
from dllm_engine.evaluation.score import mean_and_error
from dllm_engine.evaluation.tradeoff_plot import TradeoffPoint, draw_tradeoff
from dllm_engine.text import format_table
from dllm_engine.tuning.search import Search
from dllm_engine.tuning.space import PLAIN
from dllm_engine.tuning.trials import Trial

COLUMNS = ("", "SETTING", "ACCURACY", "±", "LOSS", "90 % INTERVAL", "EXAMPLES", "PASSES/TOKEN", "TOKENS/S")
SHOWN = 6
"""Settings per batch size in the table, and errors."""
Chosen = dict[str, Any]
"""A setting and its figures, as the result file has it."""


def chosen(search: Search, batch: int, brought: dict[str, Any]) -> Chosen:
    """The fastest setting within the loss at a batch size, with what is known of it. Rates are fractions.

    ``brought`` holds the request options that the tasks bring with them, where the setting leaves them open.
    """
    trial, turns = search.standings.chosen(batch), search.file.turns.get(batch)
    loss, plain = search.standings.loss(trial), search.file.plain
    accuracy, stderr = mean_and_error(trial.scores)
    plain_accuracy, plain_stderr = mean_and_error(plain.scores[: len(trial.scores)])
    figures = {
        "accuracy": accuracy,
        "accuracy_stderr": stderr,
        "plain_accuracy": plain_accuracy,
        "plain_accuracy_stderr": plain_stderr,
        "loss": loss.observed,
        "loss_lowest": loss.lowest,
        "loss_highest": loss.highest,
        "shown": loss.highest <= search.goal.loss,
        "examples": len(trial.scores),
        "tokens_per_second": trial.speeds[batch].tokens_per_second,
        "plain_tokens_per_second": plain.speeds[batch].tokens_per_second,
    }
    if turns is not None and turns.setting == trial.setting and turns.ratios:
        figures |= {
            "tokens_per_second": statistics.median(turns.chosen),
            "plain_tokens_per_second": statistics.median(turns.plain),
            "times_plain": statistics.median(turns.ratios),
            "times_plain_lowest": min(turns.ratios),
            "times_plain_highest": max(turns.ratios),
            "rounds": len(turns.ratios),
        }
    is_plain = trial.setting == PLAIN
    return trial.setting.to_json() | {"decoding": brought | trial.setting.decoding, "is_plain": is_plain} | figures


def report(search: Search, found: dict[int, Chosen], model: str, engine: dict[str, Any], length: int | None) -> str:
    """Tables and the chosen settings.

    Args:
        search: after its run.
        found: by batch size.
        engine: arguments of ``LLM`` beside the model and a setting's own.
        length: the response length, None where it is left to the checkpoint.
    """
    parts = []
    for batch, values in found.items():
        parts.append(f"Batch {batch}: settings by tokens/s and by how likely they are within the loss")
        parts.append(_table(search, batch))
        parts.append(_sentence(values, batch, search.goal.loss))
        options = as_words(engine | values["engine"] | values["decoding"])
        lines = [shlex.join(["dllm", "serve", model, *options]), *python(model, engine, values, length)]
        parts.append("\n".join(f"    {line}" for line in lines))
    tried = list(search.file.trials.values())
    errors = {trial.error: str(trial.setting) for trial in tried if trial.error}
    refuted = sum(search.standings.is_refuted(trial) for trial in tried if trial.scores)
    asked = sum(bool(trial.scores) for trial in tried)
    parts.append(
        f"{asked} settings were asked {sum(len(trial.scores) for trial in tried)} examples in all; {refuted} lose too "
        f"much by their interval."
    )
    parts += [f"Cannot be run: {setting}: {error}" for error, setting in list(errors.items())[:SHOWN]]
    if (point := 1 / len(search.file.plain.scores)) > search.goal.loss > 0:
        parts.append(
            f"One wrong answer is {100 * point:.1f} points here, more than the allowed {100 * search.goal.loss:g}: "
            f"give more tasks, or more time to ask them."
        )
    if search.ran_out:
        parts.append("The budget ended the search early; the same command goes on where it stopped.")
    return "\n\n".join(parts)


def _table(search: Search, batch: int) -> str:
    ranked, best = search.standings.ranked(batch), search.standings.chosen(batch)
    shown = [trial for place, trial in enumerate(ranked) if place < SHOWN or trial is best]
    rows = [_row(search, trial, batch) for trial in shown if trial.setting != PLAIN]
    return format_table([COLUMNS, *rows, _row(search, search.file.plain, batch)])


def _row(search: Search, trial: Trial, batch: int) -> tuple[str, ...]:
    accuracy, stderr = mean_and_error(trial.scores)
    loss = search.standings.loss(trial)
    is_plain = trial.setting == PLAIN
    return (
        "*" if trial is search.standings.chosen(batch) else "",
        "plain decoding" if is_plain else str(trial.setting),
        f"{accuracy:.1%}",
        f"{stderr:.1%}",
        "" if is_plain else f"{100 * loss.observed:.1f}",
        "" if is_plain else f"{100 * loss.lowest:.1f} … {100 * loss.highest:.1f}",
        str(len(trial.scores)),
        f"{trial.cost.forward_passes / max(trial.cost.tokens_unmasked, 1):.2f}",
        f"{trial.speeds[batch].tokens_per_second:.0f}" if batch in trial.speeds else "",
    )


def _sentence(values: Chosen, batch: int, allowed: float) -> str:
    """What is known of a chosen setting, and how surely."""
    if values["is_plain"]:
        return f"At batch {batch}, nothing faster than plain decoding was found within {100 * allowed:g} points."
    speed = f"{values['tokens_per_second']:.0f} tokens/s"
    if "times_plain" in values:
        speed += (
            f", plain decoding in turns with it {values['plain_tokens_per_second']:.0f}: {values['times_plain']:.1f} "
            f"times as fast ({values['times_plain_lowest']:.1f} … {values['times_plain_highest']:.1f} in "
            f"{values['rounds']} turns)"
        )
    interval = f"{100 * values['loss_lowest']:.1f} … {100 * values['loss_highest']:.1f}"
    sure = (
        f"shown to be within the allowed {100 * allowed:g}"
        if values["shown"]
        else f"within the allowed {100 * allowed:g} as observed, but not shown to be: the interval goes beyond it"
    )
    return (
        f"Chosen at batch {batch}: {speed}.\n"
        f"Accuracy {values['accuracy']:.1%} ± {values['accuracy_stderr']:.1%}, plain {values['plain_accuracy']:.1%} ± "
        f"{values['plain_accuracy_stderr']:.1%}, on {values['examples']} examples.\n"
        f"It loses {100 * values['loss']:.1f} points (90 % interval {interval}): {sure}."
    )


def python(model: str, engine: dict[str, Any], values: Chosen, length: int | None) -> list[str]:
    """Lines that run the setting in Python."""
    from dllm_engine.params import DiffusionParams

    given = "".join(f", {name}={value!r}" for name, value in (engine | values["engine"]).items() if value != {})
    return [f"llm = LLM({model!r}{given})", f"params = {DiffusionParams(gen_length=length, **values['decoding'])!r}"]


def draw(search: Search, path: Path) -> None:
    """A panel per batch size, a point per setting that was measured, a ring around the chosen one."""
    points = []
    for batch in search.goal.batches:
        for trial in search.file.trials.values():
            if trial.scores and batch in trial.speeds:
                points.append(_point(trial, batch, trial is search.standings.chosen(batch)))
    draw_tradeoff(points, path)


def _point(trial: Trial, batch: int, is_chosen: bool) -> TradeoffPoint:
    accuracy, stderr = mean_and_error(trial.scores)
    setting = trial.setting
    unmasking = "one" if setting.rule is None else setting.rule[0]
    costs: dict[str, float | None] = {"response tokens per second": trial.speeds[batch].tokens_per_second}
    return TradeoffPoint(
        f"accuracy at batch {batch}", setting.cache_method, unmasking, costs, accuracy, stderr, is_chosen
    )
