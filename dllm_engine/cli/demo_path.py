"""``dllm demo-path``: where the demo model lies, for tools that want a path."""

import argparse

from dllm_engine.demo import demo_model_path


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("demo-path", help="print the folder of the demo model")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(demo_model_path())
    return 0
