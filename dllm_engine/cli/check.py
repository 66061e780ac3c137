"""Check that the engine computes right on this machine.

Compares each kernel in each type with its plain version on the CPU, at the sizes of
MODEL, and the demo models' answers under every cache method with those of a CPU. Exits
with 1 if anything differs.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dllm_engine.checkpoints import check_folder
from dllm_engine.cli.arguments import add_value
from dllm_engine.demo import DEMO_MODEL
from dllm_engine.evaluation.comparison import check_folder_of
from dllm_engine.quiet import be_quiet
from dllm_engine.vllm_hooks.release import check_release

HEAD_DIMS = (16, 64, 96, 128, 256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = (
        "checkpoint or shape such as `llada-8b`, for its sizes; weights are not read "
        "(default: demo)"
    )
    parser.add_argument(
        "model", nargs="?", default=DEMO_MODEL, metavar="MODEL", help=model
    )
    parser.add_argument(
        "--only", choices=("kernels", "heads", "answers"), help="check one part alone"
    )
    add_value(
        parser, "--output", Path, "FILE", "write everything as JSON, for a report"
    )


def run(args: argparse.Namespace) -> int:
    check_folder_of(args.output)
    check_folder(args.model)
    be_quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
        "0"  # runs engines in this process, one after the other
    )
    check_release()
    import torch

    from dllm_engine.check import checks
    from dllm_engine.check.cases import BY_HEADS, OTHERS, Sizes
    from dllm_engine.checkpoints import load_config
    from dllm_engine.decoding.page_layout import head_dim_of
    from dllm_engine.evaluation.hardware import provenance

    config, machine = load_config(args.model), provenance()
    heads = config.num_attention_heads, config.num_key_value_heads, head_dim_of(config)
    sizes = Sizes(*heads, config.hidden_size, config.vocab_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"dllm-engine {machine['dllm_engine']} on {device} ({machine['processor']}), "
        f"sizes of {args.model}\n"
    )
    if device == "cpu":
        print(
            "There is no CUDA device: the CPU's kernels are checked, not those of a "
            "GPU.\n"
        )
    chosen: list[checks.Check] = []
    if args.only in (None, "kernels"):
        chosen += checks.kernel_checks(device, sizes, BY_HEADS | OTHERS)
    for dim in [
        dim
        for dim in HEAD_DIMS
        if args.only in (None, "heads") and dim != sizes.head_dim
    ]:
        chosen += checks.kernel_checks(
            device, sizes._replace(num_heads=4, num_kv_heads=2, head_dim=dim), BY_HEADS
        )
    if args.only in (None, "answers"):
        chosen += checks.answer_checks(device)
    outcomes: list[dict[str, Any]] = []
    report = {
        "machine": machine | {"device": device},
        "model": args.model,
        "sizes": sizes._asdict(),
    }
    for check in tqdm(chosen, desc="Checks", unit="", leave=False):
        outcomes.append(checks.outcome_of(*check))
        # Written after each check, because a device error may end the process.
        if args.output is not None:
            args.output.write_text(
                json.dumps(report | {"checks": outcomes}, indent=1) + "\n",
                encoding="utf-8",
            )
    print(checks.as_table(outcomes))
    failed = sum(outcome["result"] == checks.FAILED for outcome in outcomes)
    print(f"\n{len(outcomes)} checks: {len(outcomes) - failed} ok, {failed} failed")
    if args.output is not None:
        print(f"wrote {args.output}")
    return 1 if failed else 0
