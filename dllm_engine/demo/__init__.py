"""The demo models: two small diffusion models and an autoregressive guide, shipped with
the package.
"""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
DEMO_MODEL = "demo"
"""Name of the demo model, wherever a model is named."""
DEMO_BLOCKS = "demo-blocks"
"""Name of the demo model with attention by blocks."""
DEMO_MODEL_DIR: Path = _FOLDER / "model"
DEMO_BLOCKS_DIR: Path = _FOLDER / "blocks"
DEMO_GUIDE_DIR: Path = _FOLDER / "guide"
"""An autoregressive model of the same tokenizer, for Guided Diffusion."""
DEMO_MODELS: dict[str, str] = {
    DEMO_MODEL: str(DEMO_MODEL_DIR),
    DEMO_BLOCKS: str(DEMO_BLOCKS_DIR),
}
"""The folder of each name."""


def model_path(model: str) -> str:
    """The folder of a demo model; every other name unchanged."""
    return DEMO_MODELS.get(model, model)
