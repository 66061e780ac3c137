"""Servers of models that are written for them: one whose model writes markup, and one
of a block diffusion model.
"""

import json
import shutil
from pathlib import Path

import pytest

from dllm_engine.demo import model_path
from tests.support import tiny_checkpoints
from tests.support.server import Server, ServerFactory

KEY = "open-sesame"
WORD = "Hal"
MARKUP = "<img src=x onerror=window.ran=1><script>window.ran=1</script>"
"""The model copies the word, and its tokenizer writes the markup instead."""
PAGE_SIZE = 8


def keyed_server(servers: ServerFactory) -> Server:
    """Asks for a key, has a cache and records traces."""
    model = servers.folder / "markup"
    if not model.exists():
        shutil.copytree(model_path("demo"), model)
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        replace = {"type": "Replace", "pattern": {"String": WORD}, "content": MARKUP}
        tokenizer["decoder"] = {
            "type": "Sequence",
            "decoders": [tokenizer["decoder"], replace],
        }
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    flags = [
        "--cache-method",
        "sparse",
        "--retention-ratio",
        "0.5",
        "--page-size",
        "8",
        "--trace",
        "--api-key",
        KEY,
    ]
    flags += "--served-model-name demo --max-model-len 512".split()
    return servers(
        "dllm", "serve", str(model), *flags, logging_level="INFO", preloaded=False
    )


def blocks_server(servers: ServerFactory) -> Server:
    """A random model with blocks of 4 that writes the demo model's tokens. Its memory
    holds one request of the longest and a quarter, so that requests side by side are
    preempted."""
    model = servers.folder / "blocks"
    demo = Path(model_path("demo"))
    if not model.exists():
        same = {
            name: json.loads((demo / "config.json").read_text())[name]
            for name in ("vocab_size", "mask_token_id")
        }

        def never_the_mask(tensors):
            tensors["lm_head.weight"][same["mask_token_id"]] = 0

        tiny_checkpoints.write(
            "sdar",
            model,
            edit=never_the_mask,
            eos_token_id=1,
            max_position_embeddings=512,
            **same,
        )
        for file in demo.glob("tokenizer*"):
            shutil.copy(file, model)
    flags = (
        f"--page-size {PAGE_SIZE} --max-model-len 256 "
        "--enable-prompt-tokens-details --trace"
    ).split()
    # Pages of 2 layers and 2 KV heads of 24 numbers.
    flags += (
        f"--dtype float32 --kv-cache-memory-bytes {80 * 2 * PAGE_SIZE * 2 * 24 * 4}"
    ).split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for `/reset_prefix_cache`
        return servers(
            "dllm", "serve", str(model), "--served-model-name", "blocks", *flags
        )
