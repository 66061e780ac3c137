"""The command of lm-evaluation-harness, which then knows ``--model dllm``.

For example: dllm lm-eval --model dllm --model_args pretrained=demo,cache_method=sparse
--tasks TASK. Releases of lm_eval that look for plugins know the model under their own
command too.
"""

import argparse
import sys

from dllm_engine.evaluation.harness import check_lm_eval
from dllm_engine.quiet import silence_alarms
from dllm_engine.vllm_hooks.release import check_installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dllm lm-eval [arguments of `lm_eval`]"
    parser.allow_abbrev = False
    parser.set_defaults(passes_on_unknown=True)


def run(args: argparse.Namespace) -> int:
    if not args.unknown:
        raise ValueError(
            "nothing says what to run; give --model dllm --model_args pretrained=demo "
            "--tasks TASK, or `ls tasks` for a list of tasks"
        )
    silence_alarms()
    sys.argv = ["lm_eval", *args.unknown]
    check_installed()
    check_lm_eval()
    import lm_eval.models  # noqa: F401 - registers models only if none is there yet
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if "dllm" not in model_registry:  # the entry point has registered it
        # By its name, because importing it takes seconds, and arguments are parsed
        # before.
        target = "dllm_engine.evaluation.lm_eval_model:DiffusionLM"
        model_registry.register("dllm", target=target)
    cli_evaluate()
    return 0
