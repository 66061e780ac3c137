"""Command line of the training."""

import argparse
from pathlib import Path

import torch

from .recipes import RECIPES


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_demo", description="Train a demo model."
    )
    parser.add_argument(
        "which",
        choices=RECIPES,
        help="the diffusion model, the block diffusion model, or the guide",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write the checkpoint to"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few steps only, to see that everything runs",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    recipe = RECIPES[arguments.which]
    (recipe.with_steps(40) if arguments.quick else recipe).run(arguments.out)


if __name__ == "__main__":
    main()
