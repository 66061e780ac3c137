"""The config of a model on the Hugging Face Hub."""

from pathlib import Path

from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)

from dllm_engine.text import one_line

_CONFIG = "config.json"


def downloaded_config(model: str, revision: str | None, token: str | None) -> Path:
    """The config.json in the Hub's cache, downloaded if it is not there. Raises
    ``ValueError`` at once if it cannot be downloaded.
    """
    try:
        cached = try_to_load_from_cache(model, _CONFIG, revision=revision)
        if not isinstance(cached, str):
            # This asks the Hub once. A download would retry for a minute.
            url = hf_hub_url(model, _CONFIG, revision=revision)
            get_hf_file_metadata(url, token=token)
        return Path(hf_hub_download(model, _CONFIG, revision=revision, token=token))
    except Exception as error:  # an error of huggingface_hub, or of its HTTP client
        raise ValueError(
            f"config.json of model {model!r} cannot be read: {one_line(error)}; check "
            f"name and connection, or name the folder of a checkpoint"
        ) from None
