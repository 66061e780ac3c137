"""Command line of the training."""

import argparse
from pathlib import Path

import torch

from . import blocks, guide, model

TRAININGS = {"model": model, "blocks": blocks, "guide": guide}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.train_demo", description="Train a demo model.")
    parser.add_argument("which", choices=TRAININGS, help="the diffusion model, the block diffusion model, or the guide")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that everything runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    training = TRAININGS[arguments.which]
    training.run(arguments.out, training.TRAINING.quick() if arguments.quick else training.TRAINING)


if __name__ == "__main__":
    main()
