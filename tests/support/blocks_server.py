"""A server of a random block diffusion model that writes the demo model's tokens."""

import json
import shutil
from pathlib import Path

import pytest

from dllm_engine.demo import demo_model_path
from tests.support.server import Server, ServerFactory
from tests.support.tiny_checkpoints import Tensors, write_sdar

PAGE_SIZE = 8


def blocks_checkpoint(folder: Path) -> Path:
    """Blocks of 4 tokens."""
    demo = Path(demo_model_path())
    same = {name: json.loads((demo / "config.json").read_text())[name] for name in ("vocab_size", "mask_token_id")}

    def never_the_mask(t: Tensors) -> None:
        t["lm_head.weight"][same["mask_token_id"]] = 0

    write_sdar(folder, edit=never_the_mask, eos_token_id=1, max_position_embeddings=512, **same)
    for file in demo.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def blocks_server(servers: ServerFactory) -> Server:
    """Its memory holds one request of the longest and a quarter, so that requests side by side are preempted."""
    model = servers.folder / "blocks"
    if not model.exists():
        blocks_checkpoint(model)
    flags = ["--page-size", str(PAGE_SIZE), "--max-model-len", "256", "--enable-prompt-tokens-details", "--trace"]
    # Pages of 2 layers and 2 KV heads of 24 numbers.
    flags += ["--dtype", "float32", "--kv-cache-memory-bytes", str(80 * 2 * PAGE_SIZE * 2 * 24 * 4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for `/reset_prefix_cache`
        return servers("dllm", "serve", str(model), "--served-model-name", "blocks", *flags)
