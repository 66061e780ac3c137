"""``dllm check``: whether the engine computes right on this machine."""

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from dllm_engine.checkpoints import check_folder
from dllm_engine.demo import DEMO_MODEL
from dllm_engine.evaluation.result_file import check_folder_of
from dllm_engine.quiet import be_quiet
from dllm_engine.text import json_rows
from dllm_engine.vllm_hooks.release import check_release

if TYPE_CHECKING:
    from dllm_engine.check.checks import Check, Outcome

SOME_FAILED = 1
GROUPS = ("kernels", "heads", "answers")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "check",
        help="check that the engine computes right on this machine",
        description="Compares each kernel in each type with its plain version on the CPU, at the sizes of MODEL, and "
        "the demo models' answers under every cache method with those of a CPU. Exits with 1 if anything differs.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help="folder or Hugging Face name of a checkpoint, for its sizes, or a shape such as `llada-8b`; weights are "
        "not read (default: demo)",
    )
    parser.add_argument(
        "--only",
        choices=GROUPS,
        help="check one part alone: `kernels` at the sizes of MODEL, `heads` of other sizes, or `answers`",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write everything as JSON, to be attached to a report"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_folder_of(args.output)
    check_folder(args.model)
    be_quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engines in this process, one after the other
    check_release()
    import torch

    from dllm_engine.check.answers import answer_checks
    from dllm_engine.check.checks import FAILED, NOT_RUN, OK, as_table, run_checks
    from dllm_engine.check.dense import dense_checks
    from dllm_engine.check.operators import Sizes, head_checks, operator_checks
    from dllm_engine.checkpoints import load_config
    from dllm_engine.evaluation.machine import provenance

    sizes = Sizes.of_model(load_config(args.model))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = provenance()
    print(f"dllm-engine {machine['dllm_engine']} on {device} ({machine['processor']}), at the sizes of {args.model}")
    if device.type == "cpu":
        print("There is no CUDA device: the kernels are the CPU's, and those of a GPU do not run.")
    print(flush=True)
    groups: dict[str, Iterator[Check]] = {
        "kernels": chain(operator_checks(device, sizes), dense_checks(device, sizes)),
        "heads": chain.from_iterable(
            chain(head_checks(device, other), dense_checks(device, other)) for other in sizes.with_other_heads()
        ),
        "answers": answer_checks(device),
    }
    checks = list(chain.from_iterable(groups[name] for name in GROUPS if args.only in (None, name)))
    report = {"machine": machine | {"device": device.type}, "model": args.model, "sizes": asdict(sizes), "checks": []}
    outcomes: list[Outcome] = []
    for outcome in run_checks(tqdm(checks, desc="Checks", unit="", leave=False)):
        outcomes.append(outcome)
        if args.output is not None:
            # Each time: what goes wrong on a device may end the process.
            report["checks"] = [asdict(each) for each in outcomes]
            args.output.write_text(json_rows(report, depth=2) + "\n", encoding="utf-8")
    print(as_table(outcomes))
    count = Counter(outcome.result for outcome in outcomes)
    print(f"\n{len(outcomes)} checks: {count[OK]} ok, {count[FAILED]} failed, {count[NOT_RUN]} not run")
    if args.output is not None:
        print(f"wrote {args.output}")
    return SOME_FAILED if count[FAILED] else 0
