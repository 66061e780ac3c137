"""The demo model: a one-million-parameter diffusion model that ships with the package."""

from pathlib import Path

DEMO_MODEL_DIR: Path = Path(__file__).resolve().parent / "model"


def demo_model_path() -> str:
    """Return the folder of the demo checkpoint, ready to pass as a model path."""
    return str(DEMO_MODEL_DIR)
