"""Print the folder of a demo model."""

import argparse

from dllm_engine.demo import DEMO_MODEL, DEMO_MODELS, model_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = f"{' or '.join(DEMO_MODELS)} (default: %(default)s)"
    parser.add_argument("model", nargs="?", choices=DEMO_MODELS, default=DEMO_MODEL, metavar="MODEL", help=names)


def run(args: argparse.Namespace) -> int:
    print(model_path(args.model))
    return 0
