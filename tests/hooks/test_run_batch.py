"""``vllm run-batch`` answers each line by itself."""

import asyncio
import json

import pytest
from vllm.entrypoints.launchers import run_batch
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dllm_engine.vllm_hooks.release import is_installed
from dllm_engine.vllm_hooks.server.settling import CHATS
from tests.support.http_app import EngineInProcess

pytestmark = pytest.mark.skipif(
    not is_installed("0.32"), reason="vLLM 0.33 refuses such a file itself"
)
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Reverse: Rome Tom"}],
    "max_tokens": 8,
}


def line(name, body=CHAT, url=CHATS):
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


ODD = {
    "no JSON": ("{", "", "it is not JSON"),
    "nested": ("[" * 100000, "", "it is not JSON"),
    "no object": ("[1]", "", "dictionary"),
    "another route": (line("a", {"prompt": "x"}, "/v1/completions"), "a", CHATS),
    "a decision": (line("a", {"fields": {}}, "/v1/decisions"), "a", CHATS),
    "no list": (line("a", CHAT | {"messages": 1}), "a", "body: 'int'"),
    "no number": (line("a", CHAT | {"max_tokens": "x"}), "a", "body.max_tokens: Input"),
    "an option of ours": (line("a", CHAT | {"steps": 8}), "a", "vllm_xargs"),
    "no text": (line("\ud800"), "", "Unicode"),
    "no name": (json.dumps({"url": CHATS, "body": CHAT}), "", "custom_id"),
}


@pytest.fixture
def run(demo, tmp_path):
    def run(*lines):
        asked, answered = tmp_path / "asked", tmp_path / "answered"
        asked.write_text("\n".join(lines))
        parser = run_batch.make_arg_parser(FlexibleArgumentParser())
        args = ["--model", demo.model_config.model, "--served-model-name", "demo"]
        args += ["-i", str(asked), "-o", str(answered)]
        asyncio.run(run_batch.run_batch(EngineInProcess(demo), parser.parse_args(args)))
        return [json.loads(record) for record in answered.read_text().splitlines()]

    return run


def test_a_line_that_cannot_be_read_has_its_own_error(run):
    *refused, answered = run(*(text for text, *_ in ODD.values()), "", line("last"))
    for (_, name, why), record in zip(ODD.values(), refused, strict=True):
        assert record["custom_id"] == name
        assert record["response"]["status_code"] == 400
        assert why in str(record["error"]), record
    assert answered["custom_id"] == "last"
    (choice,) = answered["response"]["body"]["choices"]
    assert choice["message"]["content"] == " Tom Rome"
    assert choice["diffusion"]["tokens_unmasked"]
