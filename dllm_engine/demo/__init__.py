"""The demo models: a one-million-parameter diffusion model and its autoregressive guide, shipped with the package."""

from pathlib import Path

DEMO_MODEL = "demo"
"""The name of the demo model, wherever a model is named."""
DEMO_MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
DEMO_GUIDE_DIR: Path = Path(__file__).resolve().parent / "guide"
"""An autoregressive model of the same tokenizer, for Guided Diffusion."""


def demo_model_path() -> str:
    """Return the folder of the demo checkpoint, ready to pass as a model path."""
    return str(DEMO_MODEL_DIR)


def model_path(model: str) -> str:
    """The demo model's folder for its name; every other name as it is."""
    return demo_model_path() if model == DEMO_MODEL else model
