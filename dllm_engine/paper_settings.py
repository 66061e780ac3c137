"""The papers' settings of cache methods for particular checkpoints, where one default does not serve all."""

from pathlib import PurePath
from typing import Any

from dllm_engine.families import ModelFamily


def paper_settings(cache_method: str, model: str, family: ModelFamily) -> dict[str, Any]:
    """Cache options that replace the method's own defaults for a model, by its name and family."""
    if cache_method == "dllm_cache":
        return _dllm_cache(model, family)
    if cache_method == "dkv":
        return {"refresh_interval": 4 if family.name == "Dream" else 8}
    return {}


def _dllm_cache(model: str, family: ModelFamily) -> dict[str, Any]:
    """dLLM-Cache, Tables 1 and 2: (prompt, response) refresh intervals."""
    model = PurePath(model).name
    if family.name == "Dream":
        prompt, response = (100, 2) if "base" in model.lower() else (50, 2)
    else:
        prompt, response = (100, 6) if "1.5" in model else (50, 7)
    return {"prompt_refresh_interval": prompt, "response_refresh_interval": response}
