"""A server of a cache method that asks for a key and records traces; its model writes markup for one word."""

import json
import shutil

from dllm_engine.demo import demo_model_path
from tests.support.server import Server, ServerFactory

KEY = "open-sesame"
WORD, MARKUP = "Hal", "<img src=x onerror=window.ran=1><script>window.ran=1</script>"
"""The model copies the word, and its tokenizer writes the markup instead."""


def keyed_server(servers: ServerFactory) -> Server:
    model = servers.folder / "markup"
    if not model.exists():
        shutil.copytree(demo_model_path(), model)
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        replace = {"type": "Replace", "pattern": {"String": WORD}, "content": MARKUP}
        tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], replace]}
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    flags = ["--cache-method", "sparse", "--retention-ratio", "0.5", "--page-size", "8", "--trace", "--api-key", KEY]
    flags += ["--served-model-name", "demo", "--max-model-len", "512"]
    return servers("dllm", "serve", str(model), *flags, logging_level="INFO", preloaded=False)
